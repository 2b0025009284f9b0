"""Counts that the router keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """What the router did so far.

    Attributes:
        num_packets: Packets delivered.
        num_bytes: Their sizes, IP headers included.
        num_dropped: Packets that found the queue full, or no host with their destination.
        mean_late_us: By how much packets left later than the delay asked for, on average, in microseconds.
        max_late_us: The worst of these.
        cpu_s: Processor time of the router, in seconds.
    """

    num_packets: int
    num_bytes: int
    num_dropped: int
    mean_late_us: float
    max_late_us: float
    cpu_s: float
