"""When to try again, from how long slots were held lately."""

from __future__ import annotations

import math
from typing import Final

# Of each new time in the moving mean: what counts are the latest dozen or so.
_WEIGHT: Final = 1 / 8
# Until a slot was given back for the first time.
_UNKNOWN_S: Final = 5
_LEAST_S: Final = 1
_MOST_S: Final = 60


class HoldTimes:
    """A moving mean of how long sessions keep their slots.

    Args:
        num_slots: Sessions that run at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._mean_s: float | None = None

    def add(self, held_s: float) -> None:
        """A slot was given back after so long."""
        self._mean_s = held_s if self._mean_s is None else self._mean_s + _WEIGHT * (held_s - self._mean_s)

    def retry_after_s(self, place: int) -> int:
        """Whole seconds until whoever stands there in the line has its turn, 1 to 60.

        Args:
            place: From 1 on.
        """
        if self._mean_s is None:
            return _UNKNOWN_S
        return min(max(math.ceil(place * self._mean_s / self._num_slots), _LEAST_S), _MOST_S)
