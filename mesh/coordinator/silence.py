"""How long each stage has said nothing. Pure.

A failure detector by heartbeats (Chandra and Toueg 1996). Too eager, it takes a busy stage for a dead one: so
a coordinator that was late itself holds that against nobody.
"""

from __future__ import annotations


class Silence:
    """Counts for each stage the time in which it could have been heard and was not.

    Args:
        num_stages: Stages of the pipeline.
        interval_s: Between two questions to each stage, in seconds.
        timeout_s: A stage that is silent for longer is lost.
    """

    def __init__(self, num_stages: int, interval_s: float, timeout_s: float) -> None:
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._silent_s = [0.0] * num_stages

    def heard(self, stage: int) -> None:
        """A stage answered."""
        self._silent_s[stage] = 0.0

    def heard_all(self) -> None:
        """A window came back: every stage computed it."""
        self._silent_s = [0.0] * len(self._silent_s)

    def tick(self, elapsed_s: float) -> tuple[int, ...]:
        """Note that an interval is over; returns the stages that are lost.

        Args:
            elapsed_s: What it took. Of a longer one only the interval counts: what came meanwhile lies
                unread, and shows before the next.
        """
        counted_s = min(elapsed_s, self._interval_s)
        self._silent_s = [silent_s + counted_s for silent_s in self._silent_s]
        return tuple(stage for stage, silent_s in enumerate(self._silent_s) if silent_s > self._timeout_s)
