"""How many sessions' windows a stage computes together. Pure.

If a stage takes all that wait for it, sessions end up in one batch that walks from stage to stage, and all
stages but one have nothing to do. In groups they follow one another through the pipeline, like the
micro-batches of GPipe (Huang et al. 2019). Larger groups make better batches, where a stage computes several
rows in the time of one; more groups keep more stages busy, and the wires between them. What that is worth
follows from measured times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from speculative.cost_model import Staircase, smoothed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculative.outcome import StageMeasure

# A batch costs messages and wake-ups that no stage's clock sees: of nearly equal groups the larger wins.
_NEARLY: Final = 0.95
# Windows between two looks.
_LOOK_EVERY: Final = 32


class Grouping:
    """What the sessions of a coordinator learn together about batches.

    Args:
        num_stages: Stages of the pipeline.
    """

    def __init__(self, num_stages: int) -> None:
        self._tables = [Staircase() for _ in range(num_stages)]
        self._network_ms = 0.0
        self._rows_per_window = 1.0
        self._num_learned = 0
        self._num_sessions = 1
        self._most_together = 1

    @property
    def most_together(self) -> int:
        """Windows that may share a batch."""
        return self._most_together

    def set_num_sessions(self, num_sessions: int) -> None:
        """Note how many sessions run."""
        self._num_sessions = max(1, num_sessions)
        self._look()

    def learn(self, num_rows: int, stages: Sequence[StageMeasure], elapsed_ms: float) -> None:
        """Take the times of a window that was not a part of a prompt.

        Args:
            num_rows: Rows of the window.
            stages: What each stage took for the batch that it was in.
            elapsed_ms: From sending it to its verdict.
        """
        spent_ms = 0.0
        for table, stage in zip(self._tables, stages, strict=False):
            table.add(stage.num_rows, stage.compute_ms)
            spent_ms += stage.queue_ms + stage.compute_ms
        self._network_ms = smoothed(self._network_ms or elapsed_ms, max(0.0, elapsed_ms - spent_ms))
        self._rows_per_window += (num_rows - self._rows_per_window) / 32
        self._num_learned += 1
        if self._num_learned % _LOOK_EVERY == 0:
            self._look()

    def _look(self) -> None:
        rates = [self._windows_per_ms(together) for together in range(1, self._num_sessions + 1)]
        enough = _NEARLY * max(rates)
        self._most_together = max(number for number, rate in enumerate(rates, 1) if rate >= enough)

    def _windows_per_ms(self, together: int) -> float:
        """What groups of that size let through: what the slowest stage can, or what comes round in time."""
        num_rows = max(1, round(together * self._rows_per_window))
        times_ms = [table.ms(num_rows) for table in self._tables]
        known_ms = [each_ms for each_ms in times_ms if each_ms]
        if len(known_ms) < len(times_ms):
            # Nothing is known: as many groups as stages.
            return float(together <= max(1, -(-self._num_sessions // len(self._tables))))
        return min(together / max(known_ms), self._num_sessions / (sum(known_ms) + self._network_ms))
