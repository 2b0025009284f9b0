"""Message parts: content, reasoning and tool calls, with the formats of calls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Content:
    """Text for the client."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Reasoning text, before the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """Beginning of a call.

    Attributes:
        index: Index of the call, from 0.
        name: Name of the function.
    """

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """Further text of a call's arguments.

    Attributes:
        index: Index of the call.
        text: Part of a JSON text.
    """

    index: int
    text: str


MessagePart = Content | Reasoning | ToolCallStart | ToolCallArguments


def joined(pieces: Iterable[MessagePart]) -> list[MessagePart]:
    """The same with neighbouring parts of one kind merged, and without empty text.

    Example:
        >>> joined([Content("a"), Content(""), Content("b"), Reasoning("c")])
        [Content(text='ab'), Reasoning(text='c')]
    """
    found: list[MessagePart] = []
    for (kind, index), alike in groupby(pieces, key=_kind):
        if kind is ToolCallStart:
            found += alike
        elif text := "".join(piece.text for piece in alike if not isinstance(piece, ToolCallStart)):
            found.append(ToolCallArguments(index, text) if kind is ToolCallArguments else kind(text))
    return found


def calls_of(message_parts: Iterable[MessagePart]) -> list[tuple[str, str]]:
    """Name and arguments of each call, in order."""
    names: list[str] = []
    arguments: list[list[str]] = []
    for piece in message_parts:
        if isinstance(piece, ToolCallStart):
            names.append(piece.name)
            arguments.append([])
        elif isinstance(piece, ToolCallArguments):
            arguments[piece.index].append(piece.text)
    return [(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True)]


def _kind(piece: MessagePart) -> tuple[type[Any], int]:
    return type(piece), piece.index if isinstance(piece, ToolCallStart | ToolCallArguments) else 0


# - Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Hermes, Qwen 2.5 and 3, and our own note.
# - Llama: `{"name": …, "parameters": {…}}` as the whole answer, with `<|python_tag|>` before it or without.
#   Llama 3.1 and later.
# - Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` in newer ones.
class CallFormat(Enum):
    """A format of calls; the value is the text with which a call begins."""

    HERMES = "<tool_call>"
    LLAMA = "<|python_tag|>"
    MISTRAL = "[TOOL_CALLS]"


CALL_END: Final = "</tool_call>"
ARGUMENTS_MARK: Final = "[ARGS]"
CALL_ID_MARK: Final = "[CALL_ID]"
THINK_MARKS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))

# Control tokens in many vocabularies, without text; the parser of calls must see them.
MARKS: Final = (
    *(call_format.value for call_format in CallFormat),
    CALL_END,
    ARGUMENTS_MARK,
    CALL_ID_MARK,
    *(mark for pair in THINK_MARKS for mark in pair),
)

_TOOLS: Final = re.compile(r"\btools\b")


def knows_tools(template: str) -> bool:
    """Whether a chat template uses the tools that it is given."""
    return _TOOLS.search(template) is not None


def call_format_of(template: str) -> CallFormat:
    """Format of calls that a template describes; Hermes if it describes none, as in our own note."""
    if not knows_tools(template):
        return CallFormat.HERMES
    for call_format in (CallFormat.MISTRAL, CallFormat.HERMES):
        if call_format.value in template:
            return call_format
    is_llama = CallFormat.LLAMA.value in template or '"parameters"' in template
    return CallFormat.LLAMA if is_llama else CallFormat.HERMES


class MarkFinder:
    """Holds back the longest end of the text that may become one of the marks.

    Args:
        marks: None of them is a prefix of another.

    Example:
        >>> finder = MarkFinder(["<b>"])
        >>> [finder.push(char) for char in "a<<b>"]
        [('a', None), ('', None), ('<', None), ('', None), ('', '<b>')]
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._held = ""

    def push(self, char: str) -> tuple[str, str | None]:
        """Text that is no part of a mark, and the mark that is complete now, if any."""
        held = self._held + char
        if held in self._marks:
            self._held = ""
            return "", held
        start = 0
        while start < len(held) and not any(mark.startswith(held[start:]) for mark in self._marks):
            start += 1
        self._held = held[start:]
        return held[:start], None

    def flush(self) -> str:
        """The text held back."""
        held, self._held = self._held, ""
        return held
