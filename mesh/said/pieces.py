"""The pieces that an answer's text is told apart into."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote for itself, before its answer."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """The model calls a function.

    Attributes:
        index: Of the call, from 0 on.
        name: Of the function.
    """

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments.

    Attributes:
        index: Of the call.
        text: Part of a JSON text.
    """

    index: int
    text: str


Said = Content | Reasoning | CallBegun | CallArguments


def joined(pieces: Iterable[Said]) -> list[Said]:
    """The same with neighbours of one kind in one piece, and without empty text.

    Example:
        >>> joined([Content("a"), Content(""), Content("b"), Reasoning("c")])
        [Content(text='ab'), Reasoning(text='c')]
    """
    found: list[Said] = []
    for (kind, index), alike in groupby(pieces, key=_kind):
        if kind is CallBegun:
            found += alike
        elif text := "".join(piece.text for piece in alike if not isinstance(piece, CallBegun)):
            found.append(CallArguments(index, text) if kind is CallArguments else kind(text))
    return found


def calls_of(said: Iterable[Said]) -> list[tuple[str, str]]:
    """Name and arguments of each call, in order."""
    names: list[str] = []
    arguments: list[list[str]] = []
    for piece in said:
        if isinstance(piece, CallBegun):
            names.append(piece.name)
            arguments.append([])
        elif isinstance(piece, CallArguments):
            arguments[piece.index].append(piece.text)
    return [(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True)]


def _kind(piece: Said) -> tuple[type[Any], int]:
    return type(piece), piece.index if isinstance(piece, CallBegun | CallArguments) else 0
