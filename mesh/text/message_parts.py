"""Message parts: content, reasoning and tool calls, and the search for marks between them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_TOOLS: Final = re.compile(r"\btools\b")


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
    """Beginning of a call."""

    index: int
    """Index of the call, from 0."""
    name: str
    """Name of the function."""


@dataclass(frozen=True)
class ToolCallArguments:
    """Further text of a call's arguments."""

    index: int
    """Index of the call."""
    text: str
    """Part of a JSON text."""


MessagePart = Content | Reasoning | ToolCallStart | ToolCallArguments


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


def knows_tools(template: str) -> bool:
    """Whether a chat template uses the tools that it is given."""
    return _TOOLS.search(template) is not None
