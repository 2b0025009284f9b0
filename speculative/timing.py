"""How long the ring takes: a live model, learned from verdicts. Shared by the sessions of a coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculative.staircase import Staircase, smoothed

if TYPE_CHECKING:
    from speculative.moment import Outcome


class Timing:
    """Times of the ring, in milliseconds.

    Stages that share cores, with each other or with a draft model, compute more slowly while several are at
    it. So a stage's staircase is kept twice: of windows that had the ring to themselves, and of those that
    flew with others.

    Attributes:
        draft_ms_per_token: What a token costs the draft model; None without one.
        network_ms: What of a round no stage accounts for: hops, and the event loops between them; None
            before the first verdict.
        num_measured: Windows learned from.
    """

    def __init__(self) -> None:
        self.draft_ms_per_token: float | None = None
        self.forget_ring()

    def forget_ring(self) -> None:
        """Begin to learn anew: other stages, perhaps more or fewer, on other hosts."""
        self.network_ms: float | None = None
        self.num_measured = 0
        self._alone: list[Staircase] = []
        self._crowded: list[Staircase] = []
        self._contention = 1.0

    @property
    def contention(self) -> float:
        """How many times longer stages compute while windows fly together: 1 where each has its own core."""
        return self._contention

    def add(self, outcome: Outcome, *, is_alone: bool) -> None:
        """Learn from a judged window.

        Args:
            outcome: Its measures may be missing: then it teaches nothing.
            is_alone: Whether nothing else of its session was under way meanwhile.
        """
        stages = outcome.stages
        if not stages:
            return
        while len(self._alone) < len(stages):
            self._alone.append(Staircase())
            self._crowded.append(Staircase())
        self.num_measured += 1
        at_stages_ms = sum(stage.queue_ms + stage.compute_ms for stage in stages)
        network_ms = max(0.0, outcome.arrived_ms - outcome.sent_ms - at_stages_ms)
        self.network_ms = network_ms if self.network_ms is None else smoothed(self.network_ms, network_ms)
        tables = self._alone if is_alone else self._crowded
        for table, stage in zip(tables, stages, strict=False):
            table.add(stage.num_rows, stage.compute_ms)
        if not is_alone:
            self._note_contention(outcome)

    def stages_ms(self, num_rows: int, *, is_alone: bool) -> tuple[float, ...]:
        """What each stage computes on `num_rows` rows; empty before the first verdict."""
        times = []
        for alone, crowded in zip(self._alone, self._crowded, strict=True):
            own, other = (alone, crowded) if is_alone else (crowded, alone)
            factor = 1.0 / self._contention if is_alone else self._contention
            # One row count is no staircase: the other table's shape is better than none.
            if own.num_known > 1 or not other.num_known:
                known_ms = own.ms(num_rows)
            else:
                other_ms = other.ms(num_rows)
                known_ms = None if other_ms is None else other_ms * factor
            times.append(known_ms or 0.0)
        return tuple(times)

    def _note_contention(self, outcome: Outcome) -> None:
        computed_ms = expected_ms = 0.0
        for table, stage in zip(self._alone, outcome.stages, strict=False):
            known_ms = table.ms(stage.num_rows)
            if known_ms is None or not table.num_known:
                return
            computed_ms += stage.compute_ms
            expected_ms += known_ms
        if expected_ms > 0.0:
            # Both tables are measured at the same row counts often enough; a ratio below 1 is noise.
            self._contention = max(1.0, smoothed(self._contention, computed_ms / expected_ms))
