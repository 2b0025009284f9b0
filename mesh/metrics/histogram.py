"""How many values fell where. Pure."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Histogram:
    """Counts between fixed bounds.

    Args:
        bounds: Upper bounds, each included, ascending; whatever is larger is counted beyond the last.

    Attributes:
        total: Of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value that many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self._counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Each bound, infinity last, and how many values do not exceed it."""
        num_below = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            num_below += count
            yield bound, num_below
