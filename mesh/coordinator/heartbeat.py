"""Heartbeat: which stages have been silent for so long that they are lost.

A failure detector by heartbeats (Chandra and Toueg 1996). Time in which the coordinator itself was late is
not counted, so that a busy machine does not lose living stages.
"""

from __future__ import annotations


class LivenessMonitor:
    """Silence of each stage, in time during which it could have been heard.

    Args:
        num_stages: Stages of the pipeline.
        interval_s: Interval of the pings to each stage, in seconds.
        timeout_s: Silence after which a stage is lost, in seconds.
    """

    def __init__(self, num_stages: int, interval_s: float, timeout_s: float) -> None:
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._silent_s = [0.0] * num_stages

    def note_reply(self, stage: int) -> None:
        """Record a reply of a stage."""
        self._silent_s[stage] = 0.0

    def note_all(self) -> None:
        """Record a verdict: every stage computed its window."""
        self._silent_s = [0.0] * len(self._silent_s)

    def tick(self, elapsed_s: float) -> tuple[int, ...]:
        """Record the end of an interval; returns the stages that are lost.

        Args:
            elapsed_s: Its length. Of a longer one only the interval counts: replies that came meanwhile are
                still unread, and are recorded before the next tick.
        """
        counted_s = min(elapsed_s, self._interval_s)
        self._silent_s = [silent_s + counted_s for silent_s in self._silent_s]
        return tuple(stage for stage, silent_s in enumerate(self._silent_s) if silent_s > self._timeout_s)
