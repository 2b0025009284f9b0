"""Messages between coordinator and speculation controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculative.acceptance import Judgement
    from speculative.proposer import Proposal


@dataclass(frozen=True)
class ProposalContext:
    """State of a session when a window could be sent."""

    now_ms: float
    """Monotonic clock, milliseconds."""
    num_in_flight: int
    """Windows of this session in flight."""
    position: int
    """Number of prompt and committed tokens."""
    room: int
    """Most proposed tokens within context, requested tokens and rows of a batch."""
    num_sessions: int
    """Running sessions, this one included."""


@dataclass(frozen=True)
class Decision:
    """Number of proposed tokens to send."""

    width: int
    """Proposed tokens to send now. 0 sends a plain window if none is in flight, otherwise none."""
    reason: str
    """Reason, for logs and `timings`."""


@dataclass(frozen=True)
class StageMeasure:
    """Times of one stage for a window."""

    num_rows: int
    """Rows of its batch."""
    queue_ms: float
    """Waiting before the batch."""
    compute_ms: float
    """Computing of the whole batch."""


@dataclass(frozen=True)
class WindowOutcome:
    """A judged window."""

    judgement: Judgement
    """Its judgement."""
    proposal: Proposal
    """Its proposed tokens: all of them, if windows were in flight ahead of it."""
    position: int
    """Position of its first token."""
    sent_ms: float
    """When it was sent."""
    arrived_ms: float
    """When its verdict came."""
    num_in_flight: int
    """Windows of the session in flight when it was sent."""
    stages: tuple[StageMeasure, ...]
    """Times of each stage, in pipeline order; empty if there are none."""
    num_stale: int
    """Windows behind it that its verdict voided."""
    num_behind: int
    """Windows behind it that remain in flight."""
    num_recomputed: int = 0
    """Its first rows, which were computed before: a model with recurrent layers went back."""
