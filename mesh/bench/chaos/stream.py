"""One request of a client, with the times at which its answer came. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mesh.bench.stress.answers import Told

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Stream:
    """A request and its answer. All times, those of its record too, are seconds of `time.perf_counter`.

    Attributes:
        told: What was asked and answered.
        bytes_s: When anything at all came, comment pings included.
    """

    told: Told
    bytes_s: tuple[float, ...]

    @property
    def is_refused(self) -> bool:
        """Whether it was turned away with 503 before its answer began."""
        failure = self.told.record.failure
        return failure is not None and failure.kind == "http_503"

    def pause_s(self, start_s: float, stop_s: float) -> float:
        """The longest time between two tokens of which a part lies in that time; 0 without any."""
        return _longest(self.told.record.parts_s, start_s, stop_s)

    def silence_s(self, start_s: float, stop_s: float) -> float:
        """The same between any two bytes."""
        return _longest(self.bytes_s, start_s, stop_s)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"told": self.told.as_dict(), "bytes_s": self.bytes_s}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Stream:
        """What `as_dict` made, after JSON."""
        return cls(Told.from_dict(fields["told"]), tuple(fields["bytes_s"]))


def _longest(times_s: Sequence[float], start_s: float, stop_s: float) -> float:
    gaps = (later - earlier for earlier, later in pairwise(times_s) if later > start_s and earlier < stop_s)
    return max(gaps, default=0.0)
