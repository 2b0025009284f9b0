"""How long stages compute, and how long windows wait for them, from two looks at their totals. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class StageTimes:
    """Of one window, summed over all stages.

    Attributes:
        compute_ms: In llama.cpp.
        queue_ms: Waiting for a worker.
    """

    compute_ms: float
    queue_ms: float


@dataclass(frozen=True)
class StageTotals:
    """Since the mesh came up, or between two moments.

    Attributes:
        num_windows: Windows that went around the ring.
        compute_ms: Of all stages and windows.
        queue_ms: Of all stages and windows.
    """

    num_windows: int
    compute_ms: float
    queue_ms: float

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> StageTotals:
        """From what `/mesh/status` says."""
        stages = status["stages"]
        return cls(
            num_windows=stages[0]["windows"],
            compute_ms=sum(stage["windows"] * stage["mean_compute_ms"] for stage in stages),
            queue_ms=sum(stage["windows"] * stage["mean_queue_ms"] for stage in stages),
        )

    def __sub__(self, other: StageTotals) -> StageTotals:
        """What was added since `other`."""
        return StageTotals(
            self.num_windows - other.num_windows,
            self.compute_ms - other.compute_ms,
            self.queue_ms - other.queue_ms,
        )

    def per_window(self) -> StageTimes:
        """Means; zero without a window."""
        count = max(self.num_windows, 1)
        return StageTimes(self.compute_ms / count, self.queue_ms / count)
