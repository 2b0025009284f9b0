"""Messages between the coordinator and the speculation controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculative.acceptance import Judgement
    from speculative.proposer import Proposal


@dataclass(frozen=True)
class ProposalContext:
    """When a window could be sent.

    Attributes:
        now_ms: A monotonic clock's reading.
        num_in_flight: Windows of this session under way.
        position: Tokens of its text that are committed, prompt included.
        room: Most proposed tokens that fit: context, tokens still wanted, rows of a batch.
        num_sessions: How many run at once, this one too.
    """

    now_ms: float
    num_in_flight: int
    position: int
    room: int
    num_sessions: int


@dataclass(frozen=True)
class Decision:
    """What the window carries.

    Attributes:
        width: Proposed tokens to send now. 0 sends none: a plain window if none is under way, otherwise no
            window at all.
        reason: Why, for logs and `timings`.
    """

    width: int
    reason: str


@dataclass(frozen=True)
class StageMeasure:
    """How one stage dealt with a window.

    Attributes:
        num_rows: Rows of the batch that it was computed in.
        queue_ms: Waiting before that.
        compute_ms: Computing the whole batch.
    """

    num_rows: int
    queue_ms: float
    compute_ms: float


@dataclass(frozen=True)
class WindowOutcome:
    """A judged window.

    Attributes:
        judgement: What became of it.
        proposal: Those of its tokens that were proposed: all, if windows were ahead of it when it was sent.
        position: Of its first token.
        sent_ms: When it left.
        arrived_ms: When its verdict came.
        num_in_flight: Windows of the session that were ahead of it when it was sent.
        stages: One measure for each stage, in pipeline order; empty if the stages told none.
        num_stale: Windows behind it that its verdict voided.
        num_behind: Windows behind it that fly on.
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
