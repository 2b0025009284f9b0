"""Telemetry of rings and sessions: counts, times and the parts of a round trip."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from mesh.coordinator.groups import WindowGroups
from mesh.coordinator.prefill_pace import PrefillPace
from mesh.engine import GenerationStats, RingTimes, SpeculationReport, StageTotals
from mesh.status import RoundTripStatus, StageStatus
from speculative.acceptance import DepthStatistics, SpeculationStatistics
from speculative.proposer import EMPTY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mesh.coordinator.plugs import RingPlug, SessionPlug
    from mesh.coordinator.ring import Ring, StageAddress
    from spanmesh_proto import windows_pb2 as wire
    from speculative.acceptance import Judgement
    from speculative.cost_model import DraftCost
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
        draft_cost: Returns what the drafter costs, if there is one.
        plugs: Parts of features in the session, which have counts of their own.
    """

    def __init__(
        self,
        started_ms: float,
        *,
        initial: GenerationStats = _NOTHING,
        explain: Callable[[], Mapping[str, Any]] | None = None,
        draft_cost: Callable[[], DraftCost | None] | None = None,
        plugs: Sequence[SessionPlug] = (),
    ) -> None:
        self._started_ms = started_ms
        self._initial = initial
        self._first_token_ms: float | None = None
        self._latest_ms = started_ms
        self._explain = explain
        self._draft_cost = draft_cost
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
        cost = None if self._draft_cost is None else self._draft_cost()
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
            draft_ms_per_token=None if cost is None else cost.ms_per_token,
            draft_tokens_per_pass=None if cost is None else cost.tokens_per_pass,
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


class RoundTrips:
    """Round trips of decoding windows, as sums over their parts; prefill chunks, far larger, are left out.

    There is one hop more than there are stages: into the first, between neighbours, and from the tail back.
    Hops, waiting and computing add up to the round trip.

    Args:
        num_stages: Stages of the ring.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_windows = 0
        self._wire_us = [0] * (num_stages + 1)
        self._queue_us = [0] * num_stages
        self._compute_us = [0] * num_stages

    def add(
        self,
        times: Sequence[wire.StageTime],
        offsets_us: Sequence[int | None],
        sent_us: int,
        arrived_us: int,
    ) -> None:
        """Record a verdict.

        Args:
            times: Times measured by each stage.
            offsets_us: Clock offset of each stage from the coordinator; None where it is unknown.
            sent_us: When the window left, by the coordinator's clock.
            arrived_us: When the verdict came, by the coordinator's clock.
        """
        if len(times) != len(self._queue_us) or len(offsets_us) != len(times):
            return
        wires_us = []
        left_us = sent_us
        # What the round trip leaves for hops: a clock that is off must not make their sum longer.
        latest_us = arrived_us - sum(time.queue_us + time.compute_us for time in times)
        for time, offset_us in zip(times, offsets_us, strict=True):
            if offset_us is None or not (time.num_rows and time.arrived_us):
                return
            # Clock offsets have an error of a fraction of a hop: what one hop lacks, its neighbour has.
            there_us = max(left_us, min(time.arrived_us - offset_us, latest_us))
            wires_us.append(there_us - left_us)
            left_us = there_us + time.queue_us + time.compute_us
            latest_us += time.queue_us + time.compute_us
        wires_us.append(max(0, arrived_us - left_us))
        self._num_windows += 1
        for index, wire_us in enumerate(wires_us):
            self._wire_us[index] += wire_us
        for index, time in enumerate(times):
            self._queue_us[index] += time.queue_us
            self._compute_us[index] += time.compute_us

    def status(self) -> RoundTripStatus:
        """Sums over all windows so far, without bytes."""
        return RoundTripStatus(
            windows=self._num_windows,
            wire_ms=_as_ms(self._wire_us),
            queue_ms=_as_ms(self._queue_us),
            compute_ms=_as_ms(self._compute_us),
        )


class ActiveRing:
    """A ring from its opening to its loss, with its statistics and learned sizes.

    Args:
        stages: Addresses of the stages, in pipeline order.
        ring: Streams to them.
        max_rows: Most rows of one window.
        clock_ms: Monotonic clock, milliseconds.
        plugs: Parts of features in the ring.
        num_groups: Fixed number of groups of decoding sessions; None to find the best one.

    Attributes:
        ring: As given.
        prefill_pace: Sizes of prefill chunks.
        groups: Groups of decoding sessions, whose windows leave together.
    """

    def __init__(
        self,
        stages: Sequence[StageAddress],
        ring: Ring,
        max_rows: int,
        *,
        clock_ms: Callable[[], float],
        plugs: Sequence[RingPlug] = (),
        num_groups: int | None = None,
    ) -> None:
        self.ring = ring
        self._plugs = plugs
        self.prefill_pace = PrefillPace(len(stages), max_rows)
        self.groups = WindowGroups(
            len(stages), ring.send, clock_ms=clock_ms, num_groups=num_groups, on_failed=ring.give_up
        )
        self._stages = tuple(stages)
        self._round_trips = RoundTrips(len(stages))
        self._totals = [StageTotals() for _ in stages]

    async def open(self) -> None:
        """Connect to every stage.

        Raises:
            MeshError: See `Ring.open`; also if a stage was lost while plugs were waited for.
        """
        for plug in self._plugs:
            plug.open()
        try:
            await self.ring.open()
        except BaseException:
            await self._close_plugs()
            raise
        try:
            for plug in self._plugs:
                await plug.settled()
            # Only the first loss is reported, and nothing listens for it in that time.
            self.ring.require_whole()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all streams."""
        self.groups.close()
        self.suspend()
        await self._close_plugs()
        await self.ring.close()

    def suspend(self) -> None:
        """End what sessions wait for: they are suspended."""
        for plug in self._plugs:
            plug.suspend()

    async def _close_plugs(self) -> None:
        for plug in self._plugs:
            await plug.close()

    def count(self, times: Iterable[wire.StageTime]) -> None:
        """Add the stages' times for a window."""
        for totals, time in zip(self._totals, times, strict=False):
            if time.num_rows:
                totals.add(time)

    def add_round_trip(self, times: Sequence[wire.StageTime], sent_ms: float, arrived_ms: float) -> None:
        """Record the round trip of a decoding window; times by the coordinator's clock."""
        offsets_us = [clock.offset_us for clock in self.ring.clocks]
        self._round_trips.add(times, offsets_us, int(sent_ms * 1000), int(arrived_ms * 1000))

    def round_trips(self) -> RoundTripStatus:
        """Sums of round trips, and bytes that the coordinator sent and received for all windows."""
        ring = self.ring
        return replace(
            self._round_trips.status(), sent_bytes=ring.num_sent_bytes, received_bytes=ring.num_received_bytes
        )

    def status(self) -> tuple[StageStatus, ...]:
        """Stages with their mean times."""
        last = len(self._stages) - 1
        rtts_us = [clock.rtt_us for clock in self.ring.clocks]
        return tuple(
            StageStatus(
                index=index,
                host=stage.host,
                address=stage.address,
                layers=(stage.layers.start, stage.layers.stop),
                wire=str(stage.wire) if index < last else None,
                windows=totals.num_windows,
                compute_ms=totals.compute_ms,
                queue_ms=totals.queue_ms,
                mean_compute_ms=_mean_ms(totals.compute_us, totals.num_windows),
                mean_queue_ms=_mean_ms(totals.queue_us, totals.num_windows),
                rtt_ms=None if (rtt_us := rtts_us[index]) is None else rtt_us / 1000,
            )
            for index, (stage, totals) in enumerate(zip(self._stages, self._totals, strict=True))
        )


def _as_ms(times_us: Sequence[int]) -> tuple[float, ...]:
    return tuple(time_us / 1000 for time_us in times_us)


def _mean_ms(total_us: int, count: int) -> float:
    return round(total_us / count / 1000, 3) if count else 0.0
