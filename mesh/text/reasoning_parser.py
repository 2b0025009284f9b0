"""Reasoning parser: splits reasoning from content, incrementally."""

from __future__ import annotations

from enum import Enum, auto

from mesh.text.message_parts import THINK_MARKS, Content, MarkFinder, MessagePart, Reasoning


class _At(Enum):
    BEGINNING = auto()
    INSIDE = auto()
    BEHIND = auto()
    CONTENT = auto()


class ReasoningParser:
    """Splits reasoning, which comes first if at all, from what follows.

    White space at its ends is dropped. Later marks are content.

    Args:
        is_inside: Whether the prompt ends within reasoning, so that no mark begins it.
    """

    def __init__(self, *, is_inside: bool) -> None:
        self._is_inside = is_inside
        self._at = _At.BEGINNING
        self._held = ""
        self._has_begun = False
        self._finder = MarkFinder([end for _, end in THINK_MARKS])

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._at is _At.INSIDE or (self._is_inside and self._at is _At.BEGINNING)

    @property
    def is_over(self) -> bool:
        """Whether all further text is content."""
        return self._at is _At.CONTENT

    def push(self, char: str) -> list[MessagePart]:
        """The parts that become final with one more character."""
        match self._at:
            case _At.BEGINNING:
                return self._begin(char)
            case _At.INSIDE:
                return self._go_on(char)
            case _At.BEHIND if char.isspace():
                return []
        self._at = _At.CONTENT
        return [Content(char)]

    def flush(self) -> list[MessagePart]:
        """The parts held back, at the end."""
        held, self._held = self._held, ""
        if self._at is _At.INSIDE:
            held += self._finder.flush()
        if self.is_reasoning:
            held = held.rstrip() if self._has_begun else held.strip()
            return [Reasoning(held)] if held else []
        return [Content(held)] if held else []

    def _begin(self, char: str) -> list[MessagePart]:
        self._held += char
        said = self._held.lstrip()
        if not said:
            return []
        if any(said == begin for begin, _ in THINK_MARKS):
            self._at, self._held = _At.INSIDE, ""
            self._is_inside = False
            return []
        if any(begin.startswith(said) for begin, _ in THINK_MARKS):
            return []
        held, self._held = self._held, ""
        if not self._is_inside:
            self._at = _At.CONTENT
            return [Content(held)]
        self._at, self._is_inside = _At.INSIDE, False
        return [piece for each in held for piece in self._go_on(each)]

    def _go_on(self, char: str) -> list[MessagePart]:
        if self._at is not _At.INSIDE:
            # The end mark came among characters that were held back.
            return self.push(char)
        text, mark = self._finder.push(char)
        shown = ""
        for each in text:
            if not each.isspace():
                shown += self._held + each
                self._held = ""
                self._has_begun = True
            elif self._has_begun:
                self._held += each
        if mark is not None:
            self._at, self._held = _At.BEHIND, ""
        return [Reasoning(shown)] if shown else []


def end_of_reasoning(prompt: str) -> str | None:
    """End mark of the reasoning with which an answer to the prompt begins; None if it does not."""
    said = prompt.rstrip()
    return next((end for begin, end in THINK_MARKS if said.endswith(begin)), None)
