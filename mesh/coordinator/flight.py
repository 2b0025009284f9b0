"""A window under way, and what its verdict teaches."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from speculative.outcome import Outcome, StageMeasure

if TYPE_CHECKING:
    from collections.abc import Collection

    from mesh.coordinator.window_plan import WindowPlan
    from spanmesh_proto import windows_pb2 as wire
    from speculative.acceptance import Judgement


class Flight(NamedTuple):
    """A window under way.

    Attributes:
        id: Of the window, within its session.
        window: What was sent.
        sent_ms: When.
        num_ahead: Windows of its session that were under way then.
    """

    id: int
    window: WindowPlan
    sent_ms: float
    num_ahead: int


def measures(verdict: wire.Verdict) -> tuple[StageMeasure, ...]:
    """What each stage took for a window, in order; nothing if one did not compute it."""
    if not all(time.num_rows for time in verdict.times):
        return ()
    return tuple(
        StageMeasure(time.num_rows, time.queue_us / 1000, time.compute_us / 1000) for time in verdict.times
    )


def outcome(
    judgement: Judgement,
    flight: Flight,
    arrived_ms: float,
    *,
    stages: tuple[StageMeasure, ...],
    voided: Collection[Flight],
    behind: Collection[Flight],
) -> Outcome:
    """What the controller learns of a judged window."""
    return Outcome(
        judgement=judgement,
        proposal=flight.window.proposal,
        position=flight.window.start,
        sent_ms=flight.sent_ms,
        arrived_ms=arrived_ms,
        num_in_flight=flight.num_ahead,
        stages=stages,
        num_stale=len(voided),
        num_behind=len(behind),
    )
