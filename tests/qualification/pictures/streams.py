"""Streams that decode all the time, and the times between their tokens."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING, Final

from meshbench.load_client.schedule import Request, Schedule
from meshbench.report_tools import Line, PairedRatio
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshbench.load_client.client import LoadClient

_TOKENS: Final = 400
_END_S: Final = 120.0
_FEWEST_GAPS: Final = 100


class Streams:
    """Answers one after the other in so many places, from `running` on.

    Times between tokens while a prompt of their own is read are left out: streams that begin together also
    end together, and then wait for each other, with something beside them or without.

    Args:
        number: Answers at once.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        # Begin of each time between two tokens, in seconds, and its milliseconds.
        self._gaps: list[tuple[float, float]] = []

    @contextmanager
    def running(self, client: LoadClient, url: str) -> Iterator[None]:
        """Have them run for the block; `between` knows their tokens behind it.

        Raises:
            MeshError: If one failed.
        """
        chats = tuple((_stream(number),) for number in range(self._number))
        load = client.start(Schedule(url, chats, self._number))
        yield
        answers = load.end(timeout_s=_END_S).complete("the mesh").answers
        reading = [(one.record.sent_s, one.record.parts_s[0]) for one in answers]
        for one in answers:
            self._gaps += [
                (start, 1e3 * (stop - start))
                for start, stop in pairwise(one.record.parts_s)
                if not any(sent_s < stop and start < first_s for sent_s, first_s in reading)
            ]

    def between(self, start_s: float, stop_s: float) -> tuple[float, ...]:
        """Milliseconds between tokens, where the first came in that time of `time.perf_counter`."""
        return tuple(gap_ms for at_s, gap_ms in self._gaps if start_s <= at_s < stop_s)


def _stream(number: int) -> Request:
    content = f"Tell me a long story about number {number}."
    fields = {"max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
    return Request.streamed({"messages": [{"role": "user", "content": content}], **fields})


def p99(gaps_ms: Sequence[float]) -> float:
    """Their 99th percentile.

    Raises:
        MeshError: If they are too few for one.
    """
    if len(gaps_ms) < _FEWEST_GAPS:
        raise MeshError(f"only {len(gaps_ms)} tokens came in a round: take more streams")
    return quantiles(gaps_ms, n=100)[-1]


def ratio_line(title: str, pairs: Sequence[tuple[float, float]], most: float) -> Line:
    """Percentiles beside something over those without it, a pair for each round."""
    ratio = PairedRatio.of(pairs)
    ratios = sorted(beside / alone for beside, alone in pairs)
    note = f"95 % interval {ratio.low:.2f} to {ratio.high:.2f} of {len(pairs)} rounds"
    spread = f"which are {ratios[0]:.2f} to {ratios[-1]:.2f}, median {median(ratios):.2f}"
    return Line(title, ratio.ratio, most, is_ceiling=True, note=f"{note}, {spread}")
