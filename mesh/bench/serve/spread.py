"""How a latency is spread over the requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Spread:
    """Of some milliseconds.

    Attributes:
        count: How many there were; at least one.
        mean: Their mean.
        median: The middle one.
        std: Standard deviation of just these.
        highest: The longest.
        percentiles: Of those asked for: the number in [0, 100], and what so many percent do not exceed,
            between two of them in a straight line.
    """

    count: int
    mean: float
    median: float
    std: float
    highest: float
    percentiles: dict[float, float]


def spread(values_ms: Sequence[float], percentiles: Sequence[float]) -> Spread | None:
    """Of some milliseconds; None without any: nothing measured is not zero."""
    if not values_ms:
        return None
    values = np.asarray(values_ms)
    return Spread(
        count=len(values),
        mean=float(values.mean()),
        median=float(np.median(values)),
        std=float(values.std()),
        highest=float(values.max()),
        percentiles={wanted: float(np.percentile(values, wanted)) for wanted in percentiles},
    )
