"""Output parser: text of an answer to message parts, reasoning split off."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from mesh.text.message_parts import THINK_MARKS, Content, MarkFinder, MessagePart, Reasoning, joined
from mesh.text.tool_call_parser import ToolCallParser

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.text.message_parts import CallFormat


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


@dataclass(frozen=True)
class OutputFormat:
    """Format of an answer."""

    call_format: CallFormat | None = None
    """Format of calls; None without calls, so that all is text."""
    names: frozenset[str] = frozenset()
    """Names of the functions."""
    has_one_call: bool = False
    """Whether the answer ends with its first call."""
    splits_reasoning: bool = False
    """Whether reasoning is split from content."""
    is_in_reasoning: bool = False
    """Whether the prompt ends within reasoning."""
    shows_think_marks: bool = False
    """Whether marks of reasoning stay in the text, where it is not split."""
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON schema of each function's parameters, by its name."""

    @property
    def marks(self) -> frozenset[str]:
        """Marks that must be seen, though they may be control tokens, which have no text."""
        sees_reasoning = self.splits_reasoning or self.shows_think_marks
        found = {mark for pair in THINK_MARKS for mark in pair} if sees_reasoning else set()
        return frozenset(found if self.call_format is None else found | self.call_format.marks)


class OutputParser:
    """Incremental parser; its result does not depend on how the text is cut into chunks.

    Args:
        output_format: Format of the answer.
    """

    def __init__(self, output_format: OutputFormat) -> None:
        self._reasoning = (
            ReasoningParser(is_inside=output_format.is_in_reasoning)
            if output_format.splits_reasoning
            else None
        )
        self._calls = None
        if output_format.call_format is not None:
            self._calls = ToolCallParser(
                output_format.call_format, output_format.names, output_format.parameters
            )
        self._has_one_call = output_format.has_one_call

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def has_calls(self) -> bool:
        """Whether a function was called."""
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def ends_in_call(self) -> bool:
        """Whether the text so far ends within a call."""
        return self._calls is not None and self._calls.num_calls > self._calls.num_complete

    @property
    def is_over(self) -> bool:
        """Whether further text is ignored."""
        return self._has_one_call and self._calls is not None and self._calls.num_complete > 0

    def push(self, text: str) -> list[MessagePart]:
        """The parts that become final with this text, sometimes none."""
        if self._calls is None and (self._reasoning is None or self._reasoning.is_over):
            return [Content(text)] if text else []
        message_parts: list[MessagePart] = []
        for char in text:
            whole: list[MessagePart] = [Content(char)]
            message_parts += self._with_calls(
                whole if self._reasoning is None else self._reasoning.push(char)
            )
        return joined(message_parts)

    def flush(self, *, is_cut: bool = False, is_stopped: bool = False) -> list[MessagePart]:
        """The parts held back, at the end.

        Args:
            is_cut: Whether a limit ended the answer: then a call without its end tags stays incomplete.
            is_stopped: Whether a stop string ended the answer: then a call stays incomplete within a value.
        """
        message_parts = [] if self._reasoning is None else self._with_calls(self._reasoning.flush())
        if self._calls is not None and not self.is_over:
            message_parts += self._calls.flush(is_cut=is_cut, is_stopped=is_stopped)
        return joined(message_parts)

    def _with_calls(self, pieces: list[MessagePart]) -> list[MessagePart]:
        if self._calls is None:
            return pieces
        message_parts: list[MessagePart] = []
        for piece in pieces:
            if not isinstance(piece, Content):
                message_parts.append(piece)
                continue
            for char in piece.text:
                if self.is_over:
                    break
                message_parts += self._calls.push(char)
        return message_parts
