"""How long a batch of rows takes, learned row count by row count."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

# Of one row's time, for each further row, while only one row count was ever seen: between a GPU (nearly
# nothing) and a CPU (nearly all of it), so that wider windows are tried once and then known.
_UNKNOWN_SLOPE: Final = 0.5
# Of the slope between the last two known row counts, beyond the last.
_HOPE: Final = 0.8
_NEWEST_WEIGHT: Final = 0.125
# A sample this many times off what is known is a neighbour's doing; it counts as just so far off.
_MAX_SURPRISE: Final = 2.0


class Staircase:
    """t(k): milliseconds of a batch of `k` rows. Kernels work in tiles, so it has steps and is no line.

    Each row count keeps a running mean of its own. Between known ones the time is interpolated. Beyond the
    last it goes on a little flatter than the slope that leads to it: hope lets wider windows be tried, once,
    and then they are known. It never falls as rows are added.
    """

    def __init__(self) -> None:
        self._mean_ms: dict[int, float] = {}
        self._stairs: list[tuple[int, float]] = []

    @property
    def num_known(self) -> int:
        """Row counts that were measured."""
        return len(self._mean_ms)

    def add(self, num_rows: int, elapsed_ms: float) -> None:
        """Learn from one batch."""
        known_ms = self._mean_ms.get(num_rows)
        self._mean_ms[num_rows] = elapsed_ms if known_ms is None else smoothed(known_ms, elapsed_ms)
        self._stairs = []
        highest_ms = 0.0
        for rows in sorted(self._mean_ms):
            highest_ms = max(highest_ms, self._mean_ms[rows])
            self._stairs.append((rows, highest_ms))

    def ms(self, num_rows: int) -> float | None:
        """What a batch of so many rows takes; None if nothing was measured yet."""
        stairs = self._stairs
        if not stairs:
            return None
        if len(stairs) == 1 or num_rows < stairs[0][0]:
            rows, height_ms = stairs[0]
            return height_ms * _typical(num_rows) / _typical(rows)
        for (left, left_ms), (right, right_ms) in pairwise(stairs):
            if num_rows <= right:
                return left_ms + (right_ms - left_ms) * (num_rows - left) / (right - left)
        return right_ms + _HOPE * (right_ms - left_ms) * (num_rows - right) / (right - left)


def smoothed(mean_ms: float, newest_ms: float, weight: float = _NEWEST_WEIGHT) -> float:
    """A running mean that one wild sample cannot carry away."""
    newest_ms = min(max(newest_ms, mean_ms / _MAX_SURPRISE), mean_ms * _MAX_SURPRISE)
    return mean_ms + weight * (newest_ms - mean_ms)


def _typical(num_rows: int) -> float:
    return 1.0 + _UNKNOWN_SLOPE * (num_rows - 1)
