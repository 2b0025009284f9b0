"""Windows in flight, and what becomes of them for the controller of speculation."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from speculative.acceptance import judge_unread
from speculative.outcome import StageMeasure, WindowOutcome

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mesh.coordinator.generation import Step, WindowPlan
    from speculative.acceptance import Judgement


class InFlightWindow(NamedTuple):
    """A window in flight."""

    id: int
    """Id of the window within its session."""
    window: WindowPlan
    """The window as sent."""
    sent_ms: float
    """When it left."""
    num_ahead: int
    """Windows of its session that were in flight then."""


def outcome(
    judgement: Judgement,
    in_flight: InFlightWindow,
    arrived_ms: float,
    *,
    stages: tuple[StageMeasure, ...],
    voided: Collection[InFlightWindow],
    behind: Collection[InFlightWindow],
) -> WindowOutcome:
    """Outcome of a judged window, for the controller."""
    return WindowOutcome(
        judgement=judgement,
        proposal=in_flight.window.proposal,
        position=in_flight.window.start,
        sent_ms=in_flight.sent_ms,
        arrived_ms=arrived_ms,
        num_in_flight=in_flight.num_ahead,
        stages=stages,
        num_stale=len(voided),
        num_behind=len(behind),
        num_recomputed=in_flight.window.num_recomputed,
    )


def outcomes_of(
    step: Step,
    in_flight: InFlightWindow,
    *,
    voided: Sequence[InFlightWindow],
    behind: Collection[InFlightWindow],
    stages: tuple[StageMeasure, ...],
    arrived_ms: float,
) -> list[WindowOutcome]:
    """Outcomes of a judged window, and of one that its free prediction voided unread.

    Args:
        step: What the verdict came to.
        in_flight: The window.
        voided: Windows behind it that are void now, oldest first.
        behind: Windows that are still in flight.
        stages: Times of the window at each stage.
        arrived_ms: When the verdict came.

    Returns:
        None of a part of the prompt.
    """
    outcomes = []
    if not in_flight.window.is_prompt:
        outcomes.append(
            outcome(step.judgement, in_flight, arrived_ms, stages=stages, voided=voided, behind=behind)
        )
    if step.is_unread_next:
        judgement = judge_unread(len(voided[0].window.tokens))
        # It is stale itself: its rows are still computed at some stage.
        outcomes.append(outcome(judgement, voided[0], arrived_ms, stages=(), voided=voided, behind=()))
    return outcomes
