"""Messages between coordinator and speculation controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculative.acceptance import Judgement
    from speculative.proposer import Proposal


@dataclass(frozen=True)
class ProposalContext:
    """State of a session when a window could be sent.

    Attributes:
        now_ms: Monotonic clock, milliseconds.
        num_in_flight: Windows of this session in flight.
        position: Number of prompt and committed tokens.
        room: Most proposed tokens within context, requested tokens and rows of a batch.
        num_sessions: Running sessions, this one included.
    """

    now_ms: float
    num_in_flight: int
    position: int
    room: int
    num_sessions: int


@dataclass(frozen=True)
class Decision:
    """Number of proposed tokens to send.

    Attributes:
        width: Proposed tokens to send now. 0 sends a plain window if none is in flight, otherwise none.
        reason: Reason, for logs and `timings`.
    """

    width: int
    reason: str


@dataclass(frozen=True)
class StageMeasure:
    """Times of one stage for a window.

    Attributes:
        num_rows: Rows of its batch.
        queue_ms: Waiting before the batch.
        compute_ms: Computing of the whole batch.
    """

    num_rows: int
    queue_ms: float
    compute_ms: float


@dataclass(frozen=True)
class WindowOutcome:
    """A judged window.

    Attributes:
        judgement: Its judgement.
        proposal: Its proposed tokens: all of them, if windows were in flight ahead of it.
        position: Position of its first token.
        sent_ms: When it was sent.
        arrived_ms: When its verdict came.
        num_in_flight: Windows of the session in flight when it was sent.
        stages: Times of each stage, in pipeline order; empty if there are none.
        num_stale: Windows behind it that its verdict voided.
        num_behind: Windows behind it that remain in flight.
        num_recomputed: Its first rows, which were computed before: a model with recurrent layers went back.
    """

    judgement: Judgement
    proposal: Proposal
    position: int
    sent_ms: float
    arrived_ms: float
    num_in_flight: int
    stages: tuple[StageMeasure, ...]
    num_stale: int
    num_behind: int
    num_recomputed: int = 0
