"""Output parser: the text of an answer as message parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.text.message_parts import ARGUMENTS_MARK, CALL_END, CALL_ID_MARK, THINK_MARKS, Content, Said, joined
from mesh.text.reasoning_parser import ReasoningReader
from mesh.text.tool_call_parser import CallReader

if TYPE_CHECKING:
    from mesh.text.message_parts import CallFormat


@dataclass(frozen=True)
class Reading:
    """How an answer is read.

    Attributes:
        call_format: How functions are called in it; None where none may be, so that all is text.
        names: Of the functions that there are.
        has_one_call: Whether it is over with its first call.
        splits_reasoning: Whether reasoning is told from content.
        is_in_reasoning: Whether the prompt ended in it.
    """

    call_format: CallFormat | None = None
    names: frozenset[str] = frozenset()
    has_one_call: bool = False
    splits_reasoning: bool = False
    is_in_reasoning: bool = False

    @property
    def marks(self) -> frozenset[str]:
        """Texts that must be seen, though they may be control tokens, which have no text."""
        found = {mark for pair in THINK_MARKS for mark in pair} if self.splits_reasoning else set()
        if self.call_format is not None:
            found |= {self.call_format.value, CALL_END, ARGUMENTS_MARK, CALL_ID_MARK}
        return frozenset(found)


class MessageReader:
    """Reads as the text comes. However it is cut into pieces, what it says joined up is the same.

    Args:
        reading: How.
    """

    def __init__(self, reading: Reading) -> None:
        self._reasoning = (
            ReasoningReader(is_inside=reading.is_in_reasoning) if reading.splits_reasoning else None
        )
        self._calls = None
        if reading.call_format is not None:
            self._calls = CallReader(reading.call_format, reading.names)
        self._has_one_call = reading.has_one_call

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def has_calls(self) -> bool:
        """Whether a function was called."""
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def is_over(self) -> bool:
        """Whether what follows will not be read."""
        return self._has_one_call and self._calls is not None and self._calls.num_complete > 0

    def push(self, text: str) -> list[Said]:
        """What this much more of the text settles, often itself, sometimes nothing."""
        if self._calls is None and (self._reasoning is None or self._reasoning.is_over):
            return [Content(text)] if text else []
        said: list[Said] = []
        for char in text:
            whole: list[Said] = [Content(char)]
            said += self._with_calls(whole if self._reasoning is None else self._reasoning.push(char))
        return joined(said)

    def flush(self) -> list[Said]:
        """What was held back, once no more text will come."""
        said = [] if self._reasoning is None else self._with_calls(self._reasoning.flush())
        if self._calls is not None and not self.is_over:
            said += self._calls.flush()
        return joined(said)

    def _with_calls(self, pieces: list[Said]) -> list[Said]:
        if self._calls is None:
            return pieces
        said: list[Said] = []
        for piece in pieces:
            if not isinstance(piece, Content):
                said.append(piece)
                continue
            for char in piece.text:
                if self.is_over:
                    break
                said += self._calls.push(char)
        return said
