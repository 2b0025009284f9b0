"""Rows of drafters: what a context computes for a session, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Span = TypeVar("Span", bound="DraftSpan")


@dataclass(frozen=True)
class DraftSpan:
    """Consecutive rows to be computed for a session."""

    start: int
    """Absolute position of the first row's token. The cache's rows from there on are invalid."""
    tokens: tuple[int, ...]
    """Token ids, one a row."""
    has_output: bool = field(kw_only=True)
    """Whether the last row returns an output."""

    @property
    def stop(self) -> int:
        """Position after the last row's token."""
        return self.start + len(self.tokens)


class SlotRows(NamedTuple, Generic[Span]):
    """Rows of one session."""

    slot: int
    """Its sequence in the KV cache."""
    span: Span
    """The rows."""


class DraftOutput(NamedTuple):
    """Output of a span: the tokens behind its last row are drafted from it, one or a block of them."""

    logits: NDArray[np.float32]
    """float32 (drafted, num_tokens), by position; a view that the next `decode` overwrites."""
    state: NDArray[np.float32] | None = None
    """Output state, float32 (values,), of drafters that read features; None for others."""
