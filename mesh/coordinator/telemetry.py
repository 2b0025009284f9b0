"""Telemetry of a session: counts and times."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from mesh.engine import GenerationStats, RingTimes, SpeculationReport, StageTotals
from speculative.acceptance import DepthStatistics, SpeculationStatistics
from speculative.proposer import EMPTY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mesh.coordinator.plugs import SessionPlug
    from spanmesh_proto import windows_pb2 as wire
    from speculative.acceptance import Judgement
    from speculative.proposer import Proposal


_COUNTED_AT_ONCE: Final = 256
_NOTHING: Final = GenerationStats()


class _Judged:
    """Counts of one proposer's windows; each window is counted once, however often the figures are read."""

    def __init__(self) -> None:
        self._counted = SpeculationStatistics()
        self._fresh: list[Judgement] = []

    def add(self, judgement: Judgement) -> None:
        # Counting many at once is cheaper than one by one; the queue stays below this many.
        self._fresh.append(judgement)
        if len(self._fresh) >= _COUNTED_AT_ONCE:
            self.statistics()

    def statistics(self) -> SpeculationStatistics:
        if self._fresh:
            self._counted = self._counted.merge(SpeculationStatistics.of(self._fresh))
            self._fresh = []
        return self._counted


class SessionTelemetry:
    """Counts and times of one session.

    Args:
        started_ms: When its first window left.
        initial: Statistics that it begins with.
        explain: Returns the state of the controller; None if there is no proposer.
        draft_ms_per_token: Returns the draft model's time per token, if there is one.
        plugs: Parts of features in the session, which have counts of their own.
    """

    def __init__(
        self,
        started_ms: float,
        *,
        initial: GenerationStats = _NOTHING,
        explain: Callable[[], Mapping[str, Any]] | None = None,
        draft_ms_per_token: Callable[[], float | None] | None = None,
        plugs: Sequence[SessionPlug] = (),
    ) -> None:
        self._started_ms = started_ms
        self._initial = initial
        self._first_token_ms: float | None = None
        self._latest_ms = started_ms
        self._explain = explain
        self._draft_ms_per_token = draft_ms_per_token
        self._plugs = plugs
        self._num_windows = 0
        self._num_replays = 0
        self._num_proposed = 0
        self._num_accepted = 0
        self._num_cancels = 0
        self._num_wasted_rows = 0
        self._num_recomputed_rows = 0
        self._round_trip_ms = 0.0
        self._queue_us = 0
        self._compute_us = 0
        self._stages: list[StageTotals] = []
        self._judged: defaultdict[str, _Judged] = defaultdict(_Judged)
        self._depths: defaultdict[str, DepthStatistics] = defaultdict(DepthStatistics)
        self._voided_rows: dict[int, int] = {}

    def add_prefilled(self, arrived_ms: float) -> None:
        """Record the last verdict of the prompt, of the first prefill or of a replay."""
        if self._first_token_ms is None:
            self._first_token_ms = arrived_ms
        self._latest_ms = arrived_ms

    def add_replay(self) -> None:
        """Record a replay in another ring."""
        self._num_replays += 1

    def add_window(
        self,
        judgement: Judgement,
        proposal: Proposal,
        times: Sequence[wire.StageTime],
        *,
        sent_ms: float,
        arrived_ms: float,
        num_recomputed: int = 0,
    ) -> None:
        """Record a verdict."""
        self._num_recomputed_rows += num_recomputed
        self._latest_ms = arrived_ms
        self._round_trip_ms += arrived_ms - sent_ms
        # A recovery may have changed the number of stages.
        while len(self._stages) < len(times):
            self._stages.append(StageTotals())
        for stage, time in zip(self._stages, times, strict=False):
            self._queue_us += time.queue_us
            self._compute_us += time.compute_us
            stage.add(time)
        self._num_windows += 1
        self._add(judgement, proposal)

    def add_unread(self, judgement: Judgement, proposal: Proposal) -> None:
        """Record a window that was judged by the free prediction of the one before it."""
        self._add(judgement, proposal)

    def add_void(self, window_id: int, num_rows: int, unjudged: Proposal = EMPTY) -> None:
        """Record a window that became void in flight.

        Args:
            window_id: Its id.
            num_rows: Its rows.
            unjudged: Its proposal, unless `add_unread` recorded it.
        """
        self._voided_rows[window_id] = num_rows
        self._add_depths(unjudged, None)

    def add_cancel(self) -> None:
        """Record a cancel message."""
        self._num_cancels += 1

    def add_stale_verdict(self, window_id: int) -> None:
        """Record the verdict of a void window."""
        self._num_wasted_rows += self._voided_rows.get(window_id, 0)

    def stats(self) -> GenerationStats:
        """Counts and times so far."""
        first_token_ms = self._started_ms if self._first_token_ms is None else self._first_token_ms
        return replace(
            self._initial,
            num_windows=self._num_windows,
            num_proposed=self._num_proposed,
            num_accepted=self._num_accepted,
            num_replays=self._num_replays,
            prefill_ms=first_token_ms - self._started_ms,
            decode_ms=self._latest_ms - first_token_ms,
            report=None if self._explain is None else self.report,
            ring=self.ring_times,
        )

    def ring_times(self) -> RingTimes:
        """Times so far, by place in the ring."""
        at_stages_ms = (self._queue_us + self._compute_us) / 1000
        return RingTimes(
            tuple(replace(stage) for stage in self._stages),
            wire_ms=max(0.0, self._round_trip_ms - at_stages_ms),
        )

    def report(self) -> SpeculationReport:
        """Speculation statistics so far."""
        report = SpeculationReport(
            by_proposer={name: judged.statistics() for name, judged in self._judged.items()},
            by_depth=dict(self._depths),
            num_voided_windows=len(self._voided_rows),
            num_voided_rows=sum(self._voided_rows.values()),
            num_wasted_rows=self._num_wasted_rows,
            num_recomputed_rows=self._num_recomputed_rows,
            num_cancels=self._num_cancels,
            round_trip_ms=self._round_trip_ms,
            queue_ms=self._queue_us / 1000,
            compute_ms=self._compute_us / 1000,
            draft_ms_per_token=None if self._draft_ms_per_token is None else self._draft_ms_per_token(),
            controller={} if self._explain is None else self._explain(),
        )
        for plug in self._plugs:
            report = plug.reported(report)
        return report

    def _add(self, judgement: Judgement, proposal: Proposal) -> None:
        self._num_proposed += judgement.num_proposed
        self._num_accepted += judgement.num_accepted
        self._judged[proposal.proposer].add(judgement)
        self._add_depths(proposal, judgement.num_accepted)

    def _add_depths(self, proposal: Proposal, num_accepted: int | None) -> None:
        if proposal.depths:
            counts = DepthStatistics.of(proposal.depths, num_accepted)
            self._depths[proposal.proposer] = self._depths[proposal.proposer].merge(counts)
