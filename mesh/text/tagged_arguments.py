"""Tagged arguments: values between tags, read a character at a time and passed on as one JSON object."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from mesh.text.answer_characters import EndOfText, skip_space
from mesh.text.message_parts import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

    from mesh.text.answer_characters import Characters
    from mesh.text.argument_values import ParameterSchemas
    from mesh.text.message_parts import CallTags

_MAX_NAME_CHARS: Final = 256
_BLOCK_BEGINS: Final = tuple(begin for begin, _ in BLOCKS)
_BLOCK_ENDS: Final = tuple(end for _, end in BLOCKS)


def read_name(characters: Characters, end: str, pass_on: Callable[[str], None]) -> Generator[None, str, str]:
    """Consume a name within a tag, and the end of the tag; returns the name, empty if there is none.

    A line break or another tag ends the name as well, as some models forget the end.

    Args:
        characters: The next one is the first of the name.
        end: End of the tag; empty if it has none.
        pass_on: Called with each character.
    """
    name = ""
    while (yield from characters.peek()) not in "\n<":
        char = yield from characters.take()
        pass_on(char)
        name += char
        if len(name) > _MAX_NAME_CHARS:
            return ""
        if end and name.endswith(end):
            return _plain(name.removesuffix(end))
    if end.startswith("<") and (yield from characters.match((end,))) is not None:
        for char in end:
            pass_on(char)
    return _plain(name)


def _plain(name: str) -> str:
    return name.strip().strip("\"'")


class TaggedArguments:
    """Reader of the arguments of one call.

    A value may hold tags: one counts only if what must follow it does. Then it also ends a value that has no
    end tag.

    Args:
        characters: The next one is the first behind the name of the function.
        tags: Tags of the call.
        schemas: Schemas of the function's parameters.
        argue: Called with each piece of the JSON object.
        is_cut: Tells at the end of the text whether a limit ended it: then the object stays incomplete.
    """

    def __init__(
        self,
        characters: Characters,
        tags: CallTags,
        schemas: ParameterSchemas,
        argue: Callable[[str], None],
        is_cut: Callable[[], bool],
    ) -> None:
        self._characters = characters
        self._tags = tags
        self._schemas = schemas
        self._argue = argue
        self._is_cut = is_cut
        self._given: set[str] = set()
        self._begins = _present(tags.call, *_BLOCK_BEGINS)
        self._behind_value = _present(tags.key, tags.call_end, *_BLOCK_ENDS, *self._begins)
        self._in_value = _present(tags.value_end, tags.key, tags.call_end, *_BLOCK_ENDS)

    def read(self) -> Generator[None, str, None]:
        """Consume all arguments, and the tag that ends the call; whatever else is there ends it as well."""
        try:
            while (yield from self._argument()):
                pass
        except EndOfText:
            if not self._is_cut():
                self._close()
            raise
        self._close()

    def _close(self) -> None:
        self._argue("}" if self._given else "{}")

    def _argument(self) -> Generator[None, str, bool]:
        """Consume one more argument; returns whether there is one."""
        characters, tags = self._characters, self._tags
        yield from skip_space(characters, _drop)
        mark = yield from characters.match(self._behind_value)
        if mark != tags.key:
            if mark is not None and mark != tags.call_end:
                characters.unread(mark)
            return False
        name = yield from read_name(characters, tags.key_end, _drop)
        if tags.value:
            yield from skip_space(characters, _drop)
            if (yield from characters.match((tags.value,))) is None:
                return False
        if not name:
            return False
        self._argue(f"{', ' if self._given else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        self._given.add(name)
        yield from self._value(name)
        return True

    def _value(self, name: str) -> Generator[None, str, None]:
        is_text = self._schemas.is_text(name)
        value = _Value(
            self._argue,
            None if is_text else lambda text: self._schemas.as_json(name, text),
            is_padded=self._tags.is_padded,
        )
        try:
            while not (yield from self._ends(value)):
                pass
        except EndOfText:
            rest = self._characters.rest()
            if not self._is_cut():
                for char in rest:
                    value.add(char)
                value.end()
            raise
        value.end()

    def _ends(self, value: _Value) -> Generator[None, str, bool]:
        """Consume a part of a value, or its end tag; returns whether it has ended."""
        characters = self._characters
        mark = yield from characters.match(self._in_value)
        if mark is None:
            value.add((yield from characters.take()))
            return False
        if (yield from self._counts(mark, value)):
            if mark != self._tags.value_end:
                characters.unread(mark)
            return True
        for char in mark:
            value.add(char)
        return False

    def _counts(self, mark: str, value: _Value) -> Generator[None, str, bool]:
        """Whether a tag within a value ends it."""
        tags = self._tags
        if mark == tags.key:
            return value.is_at_line_start and (yield from self._names_another())
        if mark == tags.value_end:
            return (yield from self._follows(self._behind_value))
        return (yield from self._follows(self._begins, skipped=_BLOCK_ENDS if mark == tags.call_end else ()))

    def _names_another(self) -> Generator[None, str, bool]:
        """Whether the tag that has begun is that of a parameter without a value so far."""
        taken: list[str] = []
        try:
            name = yield from read_name(self._characters, self._tags.key_end, taken.append)
        except EndOfText:
            name = ""
        self._characters.unread("".join(taken))
        return self._schemas.has(name) and name not in self._given

    def _follows(self, marks: Collection[str], skipped: Collection[str] = ()) -> Generator[None, str, bool]:
        """Whether one of these comes next, or nothing at all, behind white space and one that is skipped."""
        taken: list[str] = []
        try:
            yield from skip_space(self._characters, taken.append)
            if (mark := (yield from self._characters.match(skipped))) is not None:
                taken.append(mark)
                yield from skip_space(self._characters, taken.append)
            mark = yield from self._characters.match(marks)
        except EndOfText:
            mark = ""
        self._characters.unread("".join(taken) + (mark or ""))
        return mark is not None


class _Value:
    """One value: a text is passed on as it comes, anything else once it is whole.

    Args:
        argue: Called with each piece of its JSON.
        as_json: Returns the JSON of the whole value; None if it is a text.
        is_padded: Whether a line break before and behind it is no part of it.

    Attributes:
        is_at_line_start: Whether its text so far is empty, or ends with a line break.
    """

    def __init__(
        self, argue: Callable[[str], None], as_json: Callable[[str], str] | None, *, is_padded: bool
    ) -> None:
        self.is_at_line_start = True
        self._argue = argue
        self._as_json = as_json
        self._is_padded = is_padded
        self._is_at_padding = is_padded
        # Of a text a line break that may be the one behind it; of anything else all characters.
        self._held: list[str] = []
        if as_json is None:
            argue('"')

    def add(self, char: str) -> None:
        is_padding, self._is_at_padding = self._is_at_padding and char == "\n", False
        self.is_at_line_start = char == "\n"
        if is_padding:
            return
        if self._as_json is None:
            self._pass_held()
        self._held.append(char)
        if self._as_json is None and not (char == "\n" and self._is_padded):
            self._pass_held()

    def _pass_held(self) -> None:
        self._argue(json.dumps("".join(self._held), ensure_ascii=False)[1:-1])
        self._held.clear()

    def end(self) -> None:
        if self._as_json is None:
            self._argue('"')
            return
        text = "".join(self._held)
        self._argue(self._as_json(text.removesuffix("\n") if self._is_padded else text))


def _present(*marks: str) -> tuple[str, ...]:
    """Those that are not empty, each once."""
    return tuple(dict.fromkeys(filter(None, marks)))


def _drop(_char: str) -> None:
    pass
