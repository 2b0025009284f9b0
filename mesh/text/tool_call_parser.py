"""Tool call parser: calls in any `CallFormat`, incrementally."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from mesh.text.answer_characters import (
    SPACE,
    Characters,
    EndOfText,
    StringEscaper,
    UnclosedJson,
    UnexpectedText,
    pass_value,
    read_text,
    skip_space,
)
from mesh.text.answer_format import SLOTS, CallForm
from mesh.text.argument_values import BareObject, PythonArguments
from mesh.text.call_marks import call_marks_of
from mesh.text.known_formats import KEY_TAGS, PARAMETER_TAGS
from mesh.text.message_parts import Content, MarkFinder, ToolCallArguments, ToolCallStart
from mesh.text.tagged_arguments import ParameterSchemas, TaggedArguments, is_name, read_name

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping

    from mesh.text.answer_format import CallFormat
    from mesh.text.call_marks import CallMarks
    from mesh.text.message_parts import MessagePart


_BETWEEN: Final = SPACE + ";,"
_MAX_HEAD_CHARS: Final = 256
_SLOT: Final = re.compile(f"[{SLOTS}]")


class ToolCallParser:
    """Parser of an answer that may call functions.

    A call is reported as soon as its name is known, and its arguments as they come: as the model wrote them,
    with escapes where JSON wants some. Text that only looks like a call is content. White space between
    content and a call is dropped.

    Args:
        call_format: Format of calls.
        names: Names of the functions. A call without marks must name one of them.
        parameters: JSON schema of each function's parameters, by its name.
    """

    def __init__(
        self,
        call_format: CallFormat,
        names: Collection[str],
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._format = call_format
        self._marks = call_marks_of(call_format)
        self._names = frozenset(names)
        self._parameters = parameters or {}
        self._schemas: dict[str, ParameterSchemas] = {}
        self._message_parts: list[MessagePart] = []
        # Content, unless a call follows or it becomes one.
        self._held: list[str] = []
        # Arguments that came before the name.
        self._early: list[str] = []
        self._num_begun = 0
        self._num_complete = 0
        self._has_arguments = False
        self._escaper = StringEscaper()
        # Of a call that has them.
        self._tags: TaggedArguments | None = None
        # Marks behind the latest call that have not come yet.
        self._awaited: set[str] = set()
        self._is_cut = False
        self._is_stopped = False
        self._finder = MarkFinder(list(dict.fromkeys((*self._marks.openings, *self._marks.ends))))
        self._characters = Characters()
        self._machine = self._read()
        next(self._machine)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_begun

    @property
    def num_complete(self) -> int:
        """Calls that are complete."""
        return self._num_complete

    @property
    def is_in_value(self) -> bool:
        """Whether the text so far ends within a value of a call, where no marks count but those of calls."""
        if not self._is_in_call:
            return False
        return self._escaper.is_in_string or (self._tags is not None and self._tags.is_in_value)

    @property
    def _is_in_call(self) -> bool:
        return self._num_begun > self._num_complete

    def push(self, char: str) -> list[MessagePart]:
        """The parts that become final with one more character."""
        self._machine.send(char)
        message_parts, self._message_parts = self._message_parts, []
        return message_parts

    def flush(self, *, is_cut: bool = False, is_stopped: bool = False) -> list[MessagePart]:
        """The parts held back, at the end.

        Args:
            is_cut: Whether a limit ended the text: then a call without its end tags stays incomplete.
            is_stopped: Whether a stop string ended the text: then a call stays incomplete within a value.
        """
        self._is_cut = is_cut
        self._is_stopped = is_stopped
        self._characters.end()
        with suppress(StopIteration):
            self._machine.throw(EndOfText())
        message_parts, self._message_parts = self._message_parts, []
        return message_parts

    def _read(self) -> Generator[None, str, None]:
        try:
            if self._marks.is_bare:
                yield from self._bare_calls()
            while True:
                yield from self._content_or_calls()
        except EndOfText:
            self._end_text(self._finder.flush() + self._characters.rest())

    def _end_text(self, rest: str) -> None:
        """Release what is held, if it is content, with what could have become a mark."""
        if self._is_in_call:
            if not self._has_arguments and not self._is_cut:
                self._argue("{}")
            return
        if (self._is_cut or self._is_stopped) and len(rest) > 1 and _begins(self._marks.openings, rest):
            self._held.clear()
        elif not (self._is_cut and _begins(self._awaited, rest)):
            self._held += rest
        if self._num_begun and not "".join(self._held).strip():
            self._held.clear()
        self._release()

    def _content_or_calls(self) -> Generator[None, str, None]:
        """Consume one character, and calls if it completes a mark."""
        text, mark = self._finder.push((yield from self._characters.take()))
        for char in text:
            self._held.append(char)
            if char not in SPACE:
                self._release()
        if mark is None:
            return
        if mark in self._marks.ends:
            self._end_block(mark)
            return
        self._held += mark
        self._awaited.clear()
        try:
            if self._marks.is_bare:
                yield from self._calls_in_a_row()
            else:
                yield from self._block(mark)
        except UnexpectedText:
            self._release()
        except EndOfText:
            self._drop_beginning(is_marked=True)
            raise

    def _drop_beginning(self, *, is_marked: bool) -> None:
        """Leave out the beginning of a call that was cut ahead of its name: it is no content."""
        if is_marked and (self._is_cut or self._is_stopped) and not self._is_in_call:
            self._held.clear()
            self._characters.rest()

    def _end_block(self, mark: str) -> None:
        """The end mark belongs to a call if there was one since the last, whatever came in between."""
        if mark in self._awaited:
            self._awaited.remove(mark)
            self._held.clear()
        else:
            self._held += mark
            self._release()

    def _block(self, mark: str) -> Generator[None, str, None]:
        """Calls between marks, in whatever form they come; at least one."""
        marks = self._marks
        if mark == marks.tag:
            # Without the mark before it, it may as well be a text about calls.
            yield from self._call(self._tagged(marks, only_known=True))
        else:
            for later in marks.blocks[marks.blocks.index(mark) + 1 :]:
                yield from skip_space(self._characters, self._hold)
                self._held += (yield from self._characters.match((later,))) or ""
            yield from self._call_in_block(mark)
        while (yield from skip_space(self._characters, self._hold)) in {"{", *marks.tag[:1]}:
            if not (yield from self._call_follows()):
                return
            yield from self._call_in_block(mark)

    def _call_follows(self) -> Generator[None, str, bool]:
        """Whether another call begins here, without a mark of its own."""
        if (yield from self._characters.peek()) == "{":
            return True
        found = yield from self._characters.match((self._marks.tag,))
        self._characters.unread(found or "")
        return found is not None

    def _call_in_block(self, mark: str) -> Generator[None, str, None]:
        form = self._format.form
        char = yield from skip_space(self._characters, self._hold)
        if char == "[" and form is not CallForm.TAGGED:
            yield from self._list()
        elif char == "{":
            yield from self._call(self._object(only_known=False))
        elif form is CallForm.TAGGED:
            yield from self._tagged_in_block(self._marks)
        elif form is CallForm.OBJECT:
            yield from self._otherwise_in_block()
        elif form is CallForm.FUNCTION:
            yield from self._call(self._function())
        else:
            # A mark of letters alone may as well be a part of a text.
            yield from self._call(self._named(only_known=not set(mark) & set("<[")))

    def _tagged_in_block(self, marks: CallMarks) -> Generator[None, str, None]:
        if marks.tag:
            if (yield from self._characters.match((marks.tag,))) is None:
                raise UnexpectedText
            self._held += marks.tag
        yield from self._call(self._tagged(marks))

    def _otherwise_in_block(self) -> Generator[None, str, None]:
        """A call of a model whose template tells of JSON, and which has learnt other tags."""
        for calls in (PARAMETER_TAGS, KEY_TAGS):
            marks = replace(call_marks_of(calls), blocks=self._marks.blocks, ends=self._marks.ends)
            found = (yield from self._characters.match((marks.tag,))) if marks.tag else ""
            if found is not None:
                self._characters.unread(found)
                yield from self._tagged_in_block(marks)
                return

    def _bare_calls(self) -> Generator[None, str, None]:
        """Calls without marks: only at the beginning of the answer."""
        if (yield from skip_space(self._characters, self._hold)) == "{":
            try:
                yield from self._calls_in_a_row(only_known=True)
            except UnexpectedText:
                self._release()
            except EndOfText:
                self._drop_beginning(is_marked='"name"' in "".join(self._held))
                raise

    def _calls_in_a_row(self, *, only_known: bool = False) -> Generator[None, str, None]:
        yield from skip_space(self._characters, self._hold)
        while True:
            yield from self._call(self._object(only_known=only_known))
            while (char := (yield from self._characters.peek())) in _BETWEEN:
                self._held.append((yield from self._characters.take()))
            if char != "{":
                return

    def _list(self) -> Generator[None, str, None]:
        """Calls in a list, with what ends it."""
        self._hold((yield from self._characters.take()))
        while True:
            yield from skip_space(self._characters, self._hold)
            is_object = (yield from self._characters.peek()) == "{"
            is_function = self._format.form is CallForm.FUNCTION and not is_object
            yield from self._call(self._function() if is_function else self._object(only_known=False))
            char = yield from skip_space(self._characters, self._hold)
            if char not in ",]":
                return
            yield from self._characters.take()
            if char == "]":
                self._held.clear()
                return

    def _call(self, parts: Generator[None, str, None]) -> Generator[None, str, None]:
        """One call; what cannot be read ends it.

        Raises:
            UnexpectedText: If it is none, or not all of it could be read.
        """
        try:
            yield from parts
        except UnexpectedText:
            if self._is_in_call:
                self._end()
            raise
        if not self._is_in_call:
            raise UnexpectedText
        self._end()
        yield from self._skip_braces()

    def _named(self, *, only_known: bool) -> Generator[None, str, None]:
        """A name and its arguments as an object, with marks between them or none."""
        head: list[str] = []
        while (yield from self._characters.peek()) != "{":
            head.append((yield from self._characters.take()))
            self._held.append(head[-1])
            if len(head) > _MAX_HEAD_CHARS:
                raise UnexpectedText
        match = self._marks.head.fullmatch("".join(head))
        if match is None or (only_known and match[1] not in self._names):
            raise UnexpectedText
        self._begin(match[1])
        if self._format.quote == '"':
            yield from self._arguments()
        else:
            yield from BareObject(self._characters, self._format.quote, self._argue).read()

    def _function(self) -> Generator[None, str, None]:
        name = ""
        while (yield from self._characters.peek()) != "(":
            name += yield from self._characters.take()
            self._held.append(name[-1])
            if len(name) > _MAX_HEAD_CHARS:
                raise UnexpectedText
        if not is_name(name.strip()):
            raise UnexpectedText
        yield from self._characters.take()
        self._begin(name.strip())
        yield from PythonArguments(self._characters, self._argue).read()

    def _tagged(self, marks: CallMarks, *, only_known: bool = False) -> Generator[None, str, None]:
        """A name and its arguments between tags, or as JSON where the first of them would begin."""
        characters, tags = self._characters, marks.tags
        if tags is None:
            raise UnexpectedText
        first_end, *further_ends = _SLOT.split(marks.name_end)
        name = yield from read_name(characters, first_end, self._hold)
        if name not in self._names and (only_known or not is_name(name)):
            raise UnexpectedText
        for end in further_ends:
            yield from self._skip_to(end)
        is_word = not marks.tag and name not in self._names
        if is_word or only_known:
            # A word is no call, nor is a tag that a text is about.
            yield from skip_space(characters, self._hold)
            found = yield from characters.match((tags.key,) if is_word else (tags.key, marks.tag_end, "{"))
            characters.unread(found or "")
            if found is None:
                raise UnexpectedText
        self._begin(name)
        if (yield from skip_space(characters, self._hold)) == "{":
            with suppress(UnclosedJson):
                yield from self._arguments()
            yield from self._skip_braces()
            yield from characters.match((marks.tag_end,) if marks.tag_end else ())
            return
        if name not in self._schemas:
            self._schemas[name] = ParameterSchemas(self._parameters.get(name))
        self._tags = TaggedArguments(
            characters,
            marks,
            tags,
            self._names,
            schemas=self._schemas[name],
            argue=self._argue,
            is_cut=lambda: self._is_cut,
            is_stopped=lambda: self._is_stopped,
        )
        yield from self._tags.read()

    def _skip_to(self, end: str) -> Generator[None, str, None]:
        """Consume what is in a slot, and the text behind it."""
        found = ""
        while not found.endswith(end):
            found += yield from self._characters.take()
            self._hold(found[-1])
            if len(found) > _MAX_HEAD_CHARS:
                raise UnexpectedText

    def _skip_braces(self) -> Generator[None, str, None]:
        """Consume braces behind a call, which are one too many."""
        while (yield from skip_space(self._characters, self._hold)) == "}":
            yield from self._characters.take()

    def _object(self, *, only_known: bool) -> Generator[None, str, None]:
        self._early.clear()
        if (yield from self._characters.peek()) != "{":
            raise UnexpectedText
        self._hold((yield from self._characters.take()))
        while (yield from skip_space(self._characters, self._hold)) != "}":
            key = yield from self._key()
            if not self._marks.name_keys and not self._is_in_call:
                # The name is the key of the arguments.
                if only_known and key not in self._names:
                    raise UnexpectedText
                self._begin(key)
                yield from self._arguments()
            else:
                yield from self._member(key, only_known=only_known)
            char = yield from skip_space(self._characters, self._hold)
            if char == ",":
                self._hold((yield from self._characters.take()))
            elif char != "}":
                raise UnexpectedText
        self._hold((yield from self._characters.take()))

    def _member(self, key: str, *, only_known: bool) -> Generator[None, str, None]:
        if self._is_in_call:
            if key in self._marks.arguments_keys and not self._has_arguments:
                yield from self._arguments()
            else:
                yield from pass_value(self._characters, self._hold)
        elif key in self._marks.name_keys:
            name = yield from read_text(self._characters, self._hold)
            if not name or (only_known and name not in self._names):
                raise UnexpectedText
            self._begin(name)
            if self._early:
                self._argue("".join(self._early))
        elif key in self._marks.arguments_keys and (yield from self._characters.peek()) == '"':
            self._early.append((yield from read_text(self._characters, self._hold)).strip())
        elif key in self._marks.arguments_keys:
            yield from pass_value(self._characters, self._hold_early)
        else:
            yield from pass_value(self._characters, self._hold)

    def _key(self) -> Generator[None, str, str]:
        key = yield from read_text(self._characters, self._hold)
        if (yield from skip_space(self._characters, self._hold)) != ":":
            raise UnexpectedText
        self._hold((yield from self._characters.take()))
        yield from skip_space(self._characters, self._hold)
        return key

    def _arguments(self) -> Generator[None, str, None]:
        if (yield from self._characters.peek()) == '"':
            # JSON within JSON, as some models write it.
            self._argue((yield from read_text(self._characters, self._hold)).strip())
        else:
            try:
                yield from pass_value(self._characters, self._argue)
            except UnclosedJson as error:
                self._argue(error.closing)
                raise

    def _begin(self, name: str) -> None:
        self._held.clear()
        self._message_parts.append(ToolCallStart(self._num_begun, name))
        self._num_begun += 1
        self._has_arguments = False
        self._escaper, self._tags = StringEscaper(), None

    def _argue(self, text: str) -> None:
        if text:
            self._has_arguments = True
            self._message_parts.append(ToolCallArguments(self._num_begun - 1, self._escaper.escaped(text)))

    def _end(self) -> None:
        if not self._has_arguments:
            self._argue("{}")
        self._num_complete += 1
        self._awaited = set(self._marks.ends)
        self._held.clear()

    def _hold(self, char: str) -> None:
        # After the beginning of a call nothing is content.
        if not self._is_in_call:
            self._held.append(char)

    def _hold_early(self, char: str) -> None:
        self._hold(char)
        self._early.append(char)

    def _release(self) -> None:
        if self._held:
            self._message_parts.append(Content("".join(self._held)))
            self._held.clear()


def _begins(marks: Collection[str], text: str) -> bool:
    """Whether one of the marks begins with a text."""
    return any(mark.startswith(text) for mark in marks)
