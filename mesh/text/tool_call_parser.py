"""Tool call parser: calls in the formats of `CallFormat`, incrementally."""

from __future__ import annotations

import re
from contextlib import suppress
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
from mesh.text.message_parts import (
    ARGUMENTS_MARK,
    CALL_ID_MARK,
    GLM_TAGS,
    MINIMAX_TAGS,
    QWEN_TAGS,
    CallFormat,
    Content,
    MarkFinder,
    ToolCallArguments,
    ToolCallStart,
)
from mesh.text.tagged_arguments import ParameterSchemas, TaggedArguments, is_name, read_name

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping

    from mesh.text.message_parts import CallTags, MessagePart


_ARGUMENTS: Final = frozenset({"arguments", "parameters"})
_BETWEEN: Final = SPACE + ";,"
# Between a name and its arguments, where a call is no JSON object.
_HEAD: Final = re.compile(
    rf"([A-Za-z0-9_.-]+)\s*(?:{re.escape(CALL_ID_MARK)}[A-Za-z0-9]+)?(?:{re.escape(ARGUMENTS_MARK)})?\s*"
)
_MAX_HEAD_CHARS: Final = 256
_TAGS_BY_CALL: Final = {tags.call: tags for tags in (QWEN_TAGS, MINIMAX_TAGS)}


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
        self._awaits_end = False
        self._is_cut = False
        self._is_stopped = False
        self._finder = MarkFinder((*call_format.openings, *call_format.endings))
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
            if self._format is CallFormat.LLAMA:
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
        if (self._is_cut or self._is_stopped) and len(rest) > 1 and _begins(self._format.openings, rest):
            self._held.clear()
        elif not (self._is_cut and self._awaits_end and _begins(self._format.endings, rest)):
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
        if mark in self._format.endings:
            self._end_block(mark)
            return
        self._held += mark
        self._awaits_end = False
        try:
            if self._format is CallFormat.MISTRAL:
                yield from self._mistral_calls()
            elif self._format is CallFormat.LLAMA:
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
        if self._awaits_end:
            self._held.clear()
        else:
            self._held += mark
            self._release()
        self._awaits_end = False

    def _block(self, mark: str) -> Generator[None, str, None]:
        """Calls between marks, in whatever form they come; at least one."""
        if mark in _TAGS_BY_CALL:
            # Without the mark before it, it may as well be a text about calls.
            yield from self._call(self._tagged(_TAGS_BY_CALL[mark], only_known=True))
        else:
            yield from self._call_in_block()
        while (yield from skip_space(self._characters, self._hold)) in "{<":
            if not (yield from self._call_follows()):
                return
            yield from self._call_in_block()

    def _call_follows(self) -> Generator[None, str, bool]:
        """Whether another call begins here, without a mark of its own."""
        if (yield from self._characters.peek()) == "{":
            return True
        found = yield from self._characters.match(_TAGS_BY_CALL)
        self._characters.unread(found or "")
        return found is not None

    def _call_in_block(self) -> Generator[None, str, None]:
        char = yield from skip_space(self._characters, self._hold)
        if char == "{":
            yield from self._call(self._object(only_known=False))
        elif (tag := (yield from self._characters.match(_TAGS_BY_CALL))) is not None:
            self._held += tag
            yield from self._call(self._tagged(_TAGS_BY_CALL[tag]))
        else:
            yield from self._call(self._tagged(GLM_TAGS))

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

    def _mistral_calls(self) -> Generator[None, str, None]:
        if (yield from skip_space(self._characters, self._hold)) != "[":
            yield from self._call(self._named())
            return
        self._hold((yield from self._characters.take()))
        while True:
            yield from skip_space(self._characters, self._hold)
            yield from self._call(self._object(only_known=False))
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

    def _named(self) -> Generator[None, str, None]:
        """A name and its arguments as JSON, with marks between them or none."""
        head: list[str] = []
        while (yield from self._characters.peek()) != "{":
            head.append((yield from self._characters.take()))
            self._held.append(head[-1])
            if len(head) > _MAX_HEAD_CHARS:
                raise UnexpectedText
        if (match := _HEAD.fullmatch("".join(head))) is None:
            raise UnexpectedText
        self._begin(match[1])
        yield from self._arguments()

    def _tagged(self, tags: CallTags, *, only_known: bool = False) -> Generator[None, str, None]:
        """A name and its arguments between tags, or as JSON where the first of them would begin."""
        characters = self._characters
        name = yield from read_name(characters, tags.name_end, self._hold)
        if name not in self._names and (only_known or not is_name(name)):
            raise UnexpectedText
        is_word = not tags.call and name not in self._names
        if is_word or only_known:
            # A word is no call, nor is a tag that a text is about.
            yield from skip_space(characters, self._hold)
            found = yield from characters.match((tags.key,) if is_word else (tags.key, tags.call_end, "{"))
            characters.unread(found or "")
            if found is None:
                raise UnexpectedText
        self._begin(name)
        if (yield from skip_space(characters, self._hold)) == "{":
            with suppress(UnclosedJson):
                yield from self._arguments()
            yield from self._skip_braces()
            yield from characters.match((tags.call_end,) if tags.call_end else ())
            return
        if name not in self._schemas:
            self._schemas[name] = ParameterSchemas(self._parameters.get(name))
        yield from TaggedArguments(
            characters,
            self._format,
            self._names,
            tags,
            schemas=self._schemas[name],
            argue=self._argue,
            is_cut=lambda: self._is_cut,
            is_stopped=lambda: self._is_stopped,
        ).read()

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
            yield from self._member(key, only_known=only_known)
            char = yield from skip_space(self._characters, self._hold)
            if char == ",":
                self._hold((yield from self._characters.take()))
            elif char != "}":
                raise UnexpectedText
        self._hold((yield from self._characters.take()))

    def _member(self, key: str, *, only_known: bool) -> Generator[None, str, None]:
        if self._is_in_call:
            if key in _ARGUMENTS and not self._has_arguments:
                yield from self._arguments()
            else:
                yield from pass_value(self._characters, self._hold)
        elif key == "name":
            name = yield from read_text(self._characters, self._hold)
            if not name or (only_known and name not in self._names):
                raise UnexpectedText
            self._begin(name)
            if self._early:
                self._argue("".join(self._early))
        elif key in _ARGUMENTS and (yield from self._characters.peek()) == '"':
            self._early.append((yield from read_text(self._characters, self._hold)).strip())
        elif key in _ARGUMENTS:
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
        self._escaper = StringEscaper()

    def _argue(self, text: str) -> None:
        if text:
            self._has_arguments = True
            self._message_parts.append(ToolCallArguments(self._num_begun - 1, self._escaper.escaped(text)))

    def _end(self) -> None:
        if not self._has_arguments:
            self._argue("{}")
        self._num_complete += 1
        self._awaits_end = True
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
