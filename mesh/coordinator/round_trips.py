"""Where the time of a window's way round the ring went: each hop, each queue, each stage. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spanmesh_proto import windows_pb2 as wire


class RoundTrips:
    """Times of windows that decode, summed; chunks of prompts, which are far larger, are left out.

    There is one hop more than there are stages: into the first, from one to the next, and from the tail back.
    Together with waiting and computing they are the whole round trip.

    Args:
        num_stages: Stages of the ring.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_windows = 0
        self._wire_us = [0] * (num_stages + 1)
        self._queue_us = [0] * num_stages
        self._compute_us = [0] * num_stages

    def add(
        self,
        times: Sequence[wire.StageTime],
        offsets_us: Sequence[int | None],
        sent_us: int,
        arrived_us: int,
    ) -> None:
        """A verdict came.

        Args:
            times: What each stage says.
            offsets_us: What each stage's clock shows beyond the coordinator's; None where nobody knows.
            sent_us: When the window left, by the coordinator's clock.
            arrived_us: When the verdict came.
        """
        if len(times) != len(self._queue_us) or len(offsets_us) != len(times):
            return
        wires_us = []
        left_us = sent_us
        for time, offset_us in zip(times, offsets_us, strict=True):
            if offset_us is None or not (time.num_rows and time.arrived_us):
                return
            # Clocks are known to a fraction of a hop only: what one hop lacks is its neighbour's.
            there_us = max(left_us, min(time.arrived_us - offset_us, arrived_us))
            wires_us.append(there_us - left_us)
            left_us = there_us + time.queue_us + time.compute_us
        wires_us.append(max(0, arrived_us - left_us))
        self._num_windows += 1
        for index, wire_us in enumerate(wires_us):
            self._wire_us[index] += wire_us
        for index, time in enumerate(times):
            self._queue_us[index] += time.queue_us
            self._compute_us[index] += time.compute_us

    def as_dict(self) -> dict[str, Any]:
        """Sums, fit for JSON: whoever looks twice knows what happened meanwhile."""
        return {
            "windows": self._num_windows,
            "wire_ms": _as_ms(self._wire_us),
            "queue_ms": _as_ms(self._queue_us),
            "compute_ms": _as_ms(self._compute_us),
        }


def _as_ms(times_us: Sequence[int]) -> list[float]:
    return [time_us / 1000 for time_us in times_us]
