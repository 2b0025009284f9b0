"""How far a stage's clock is from the coordinator's, and how long the way there and back takes. Pure.

By the clock filter of NTP (Mills, RFC 5905): of the latest questions the one that came back soonest waited
least anywhere, so its halves are the most alike, and half of what it took bounds the error.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

# At four questions a second these are 4 s: two clocks drift apart by less than half a millisecond.
_NUM_SAMPLES = 16


class _Sample(NamedTuple):
    rtt_us: int
    offset_us: int


class ClockOffset:
    """Of one stage."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=_NUM_SAMPLES)

    def add(self, sent_us: int, stage_us: int, received_us: int) -> None:
        """A question was answered.

        Args:
            sent_us: When it left, by the coordinator's clock.
            stage_us: When the stage answered, by its own.
            received_us: When the answer was there, by the coordinator's.
        """
        self._samples.append(_Sample(received_us - sent_us, stage_us - (sent_us + received_us) // 2))

    @property
    def rtt_us(self) -> int | None:
        """The shortest of the latest round trips; None before the first."""
        return self._best.rtt_us if self._samples else None

    @property
    def offset_us(self) -> int | None:
        """What the stage's clock shows beyond the coordinator's; None while nobody knows."""
        return self._best.offset_us if self._samples else None

    @property
    def _best(self) -> _Sample:
        return min(self._samples)
