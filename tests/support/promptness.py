"""How long something takes on a machine that others use, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def quickest_s(attempt: Callable[[], float], within_s: float, num_attempts: int = 3) -> float:
    """The least of several attempts' durations, in seconds; no more attempts than it takes to be in time.

    A busy machine may hold up one attempt, but it does not make any quicker.
    """
    least_s = float("inf")
    for _ in range(num_attempts):
        least_s = min(least_s, attempt())
        if least_s < within_s:
            break
    return least_s
