"""Header parser: an answer of several messages, each with a header that tells what it is."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from mesh.text.answer_format import CallForm, CallFormat, Headers
from mesh.text.message_parts import Content, MarkFinder, Reasoning

if TYPE_CHECKING:
    from collections.abc import Collection

    from mesh.text.message_parts import MessagePart
    from mesh.text.tool_call_parser import ToolCallParser

# A mark that no text has: of calls whose name is in a header.
_CALL: Final = "<\ufdd6>"
_MOST_HEADER_CHARS: Final = 300
_OF_PEOPLE: Final = frozenset({"user", "assistant", "self"})
_BETWEEN: Final = "\n\n"


class _Kind(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    DROPPED = auto()


class HeaderParser:
    """Parser of an answer of several messages: reasoning, texts and calls.

    Args:
        headers: Headers of messages.
        calls: Parser of calls, in `format_of_messages`; None without calls.
        names: Names of the functions.
        is_named_in_header: Whether the name of a function is in the header alone.
        splits_reasoning: Whether reasoning is told apart; if not, it is content with its marks.
        is_inside: Whether the prompt ends within reasoning.
    """

    def __init__(
        self,
        headers: Headers,
        calls: ToolCallParser | None,
        names: Collection[str],
        *,
        is_named_in_header: bool,
        splits_reasoning: bool,
        is_inside: bool,
    ) -> None:
        self._headers = headers
        self._calls = calls
        self._names = names
        self._splits_reasoning = splits_reasoning
        self._is_named_in_header = is_named_in_header
        field, _, self._prefix = headers.recipient.rpartition("=")
        self._recipient = re.compile(rf"{re.escape(field)}=([^\s<]+)")
        self._finder = MarkFinder(list(dict.fromkeys((headers.begin, *headers.ends))))
        self._kind = _Kind.REASONING if is_inside else None
        # So far, of a header; of reasoning what may be white space at its end.
        self._header = ""
        self._held = ""
        self._num_messages = 0
        self._has_reasoning = self._has_begun = False

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._kind is _Kind.REASONING

    @property
    def is_in_header(self) -> bool:
        """Whether the text so far ends within a header."""
        return self._kind is None

    @property
    def is_over(self) -> bool:
        """Whether all further text is content."""
        return False

    def push(self, char: str) -> list[MessagePart]:
        """The parts that become final with one more character."""
        if self._kind is None:
            return self._in_header(char)
        if self._calls is not None and self._kind is _Kind.CALL and self._calls.is_in_value:
            return self._calls.push(char)
        text, mark = self._finder.push(char)
        parts = self._said(text)
        if mark is not None:
            if self._kind is _Kind.REASONING and not self._splits_reasoning:
                parts.append(Content(mark))
            self._kind, self._header, self._held = None, mark if mark == self._headers.begin else "", ""
        return parts

    def flush(self) -> list[MessagePart]:
        """The parts held back, at the end."""
        if self._kind is not None:
            return self._said(self._finder.flush())
        header, self._header = self._header, ""
        # The answer has no header at all.
        return [Content(header)] if header and not self._num_messages else []

    def _in_header(self, char: str) -> list[MessagePart]:
        self._header += char
        if not self._header.endswith(self._headers.body):
            if len(self._header) <= _MOST_HEADER_CHARS:
                return []
            header, self._header, self._kind = self._header, "", _Kind.CONTENT
            return [Content(header)]
        header, self._header = self._header, ""
        self._num_messages += 1
        self._kind, name = self._read(header)
        if self._kind is _Kind.REASONING:
            self._has_begun = False
            if not self._splits_reasoning:
                return [Content(header.rpartition(self._headers.reasoning)[1] + self._headers.body)]
        if self._kind is _Kind.CALL and self._calls is not None:
            # Other formats have the name in the message as well.
            begun = f"{_CALL}{name}" if self._is_named_in_header else ""
            return [part for each in begun for part in self._calls.push(each)]
        return []

    def _read(self, header: str) -> tuple[_Kind, str]:
        """Kind of the message behind a header, and the name of the function if it is a call."""
        to = (self._recipient.findall(header) or [""])[-1]
        name = to.removeprefix(self._prefix)
        if (self._prefix and name != to) or to in self._names:
            return (_Kind.DROPPED if self._calls is None else _Kind.CALL), name
        if self._headers.reasoning in header:
            return _Kind.REASONING, ""
        if to and to not in _OF_PEOPLE:
            # It has nobody to answer it.
            return (_Kind.DROPPED if self._calls is None else _Kind.CALL), name
        return _Kind.CONTENT, ""

    def _said(self, text: str) -> list[MessagePart]:
        if not text:
            return []
        match self._kind:
            case _Kind.REASONING if self._splits_reasoning:
                return self._thought(text)
            case _Kind.CALL if self._calls is not None:
                return [part for char in text for part in self._calls.push(char)]
            case _Kind.DROPPED:
                return []
        return [Content(text)]

    def _thought(self, text: str) -> list[MessagePart]:
        shown = ""
        for char in text:
            if not char.isspace():
                between = _BETWEEN if self._has_reasoning and not self._has_begun else ""
                shown += between + self._held + char
                self._held, self._has_begun, self._has_reasoning = "", True, True
            elif self._has_begun:
                self._held += char
        return [Reasoning(shown)] if shown else []


def format_of_messages(headers: Headers, calls: CallFormat) -> CallFormat:
    """Format of calls within messages that have headers."""
    if is_named_in_header(headers, calls):
        return CallFormat(CallForm.NAMED, _CALL, "", "")
    return replace(calls, begin="", call=calls.call.rpartition(headers.body)[2], separator="", end="")


def is_named_in_header(headers: Headers, calls: CallFormat) -> bool:
    """Whether the name of a function is in the header of a message alone."""
    return headers.body in calls.name_end
