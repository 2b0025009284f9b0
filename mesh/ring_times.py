"""Where an answer's time went: computing and waiting at each stage, and the wire between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StageTimes:
    """What one stage took, summed over windows.

    Attributes:
        num_windows: That it computed; what it only sent on again is left out.
        compute_ms: Computing; drawing and verifying too, where it is the tail.
        queue_ms: Windows waiting for it.
    """

    num_windows: int = 0
    compute_ms: float = 0.0
    queue_ms: float = 0.0


@dataclass(frozen=True)
class RingTimes:
    """One answer's windows, chunks of its prompt left out.

    Several windows may be under way at once: then the sums exceed the time that passed.

    Attributes:
        stages: In the order of the pipeline.
        wire_ms: The part of the windows' round trips that no stage accounts for: network, and what passes
            messages on at its ends. Clocks of hosts differ, so it is known of the whole round only.
    """

    stages: tuple[StageTimes, ...] = ()
    wire_ms: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON: part of `timings`. A round has one hop more than there are stages."""
        hops = len(self.stages) + 1
        num_windows = max((stage.num_windows for stage in self.stages), default=0)
        return {
            "stages": [
                {
                    "windows": stage.num_windows,
                    "compute_ms": round(stage.compute_ms, 3),
                    "queue_ms": round(stage.queue_ms, 3),
                }
                for stage in self.stages
            ],
            "wire_ms": round(self.wire_ms, 3),
            "wire_ms_per_hop": round(self.wire_ms / hops / num_windows, 3) if num_windows else 0.0,
        }
