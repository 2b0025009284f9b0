"""Marks in a text that comes character by character."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class MarkFinder:
    """Holds back the longest end of the text that may still become one of the marks.

    Args:
        marks: None of them begins another.

    Example:
        >>> finder = MarkFinder(["<b>"])
        >>> [finder.push(char) for char in "a<<b>"]
        [('a', None), ('', None), ('<', None), ('', None), ('', '<b>')]
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._held = ""

    def push(self, char: str) -> tuple[str, str | None]:
        """Text that is no part of a mark, and the mark that is complete now, if one is."""
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
        """What was held back."""
        held, self._held = self._held, ""
        return held
