"""Links: measured round trips and bandwidths between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class LinkProbeOptions:
    """Options of a link measurement."""

    hidden_bytes: int
    """Size of one row of hidden states on the wire."""
    num_probes: int = 20
    """Number of round trips of each size."""
    bulk_bytes: int = 0
    """Bytes sent to measure the bandwidth; 0 for no such measurement."""
    checks_ports: bool = False
    """Whether to try ports of the other host's range as well."""

    @property
    def patience_s(self) -> float:
        """Longest time for one link: round trips of a quarter of a second, 1 MB/s, time to connect."""
        ports_s = 5 if self.checks_ports else 0
        return 5 + 2 * self.num_probes * 0.25 + 2 * self.bulk_bytes / 1e6 + ports_s


@dataclass(frozen=True)
class Link:
    """Measured link from one host to another."""

    source: str
    """Name of the host that measured."""
    target: str
    """Name of the host that answered."""
    small_ms: tuple[float, ...] = ()
    """Round trip times of 64 bytes."""
    hidden_ms: tuple[float, ...] = ()
    """Round trip times of one row of hidden states there and 64 bytes back."""
    bytes_per_s: float | None = None
    """Bandwidth; None if it was not measured."""
    failure: str = ""
    """Reason why nothing was measured, or empty."""
    ports: str = ""
    """The target's port range, such as `20000-20099`; empty if it has none, or was not checked."""
    closed_ports: tuple[int, ...] = ()
    """Ports of that range that were tried and could not be reached."""

    @property
    def hop_ms(self) -> float | None:
        """One-way time of a row of hidden states: its round trip less half of a small one's.

        Taken from the shortest ones, since longer ones waited elsewhere than on the wire. If every small one
        took longer than a row, half of the row's own round trip is the upper bound.
        """
        if not self.small_ms or not self.hidden_ms:
            return None
        there_and_back_ms = min(self.hidden_ms)
        return there_and_back_ms - min(*self.small_ms, there_and_back_ms) / 2

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "from": self.source,
            "to": self.target,
            "rtt_ms": _percentiles(self.small_ms),
            "hidden_rtt_ms": _percentiles(self.hidden_ms),
            "hop_ms": self.hop_ms,
            "bytes_per_s": self.bytes_per_s,
            "failure": self.failure or None,
            "ports": self.ports or None,
            "closed_ports": list(self.closed_ports),
        }


@dataclass(frozen=True)
class Links:
    """Links between some hosts."""

    links: tuple[Link, ...]
    """In any order, at most one for each direction."""

    @property
    def is_complete(self) -> bool:
        """Whether every link could be measured."""
        return all(link.hop_ms is not None for link in self.links)

    def hop_ms(self, source: str, target: str) -> float:
        """One-way time; 0 from a host to itself. A link measured from the other end only counts as that.

        Raises:
            KeyError: If it was measured from neither end.
        """
        if source == target:
            return 0.0
        for a, b in ((source, target), (target, source)):
            for link in self.links:
                if (link.source, link.target) == (a, b) and link.hop_ms is not None:
                    return link.hop_ms
        raise KeyError((source, target))

    def knows(self, hosts: Iterable[str]) -> bool:
        """Whether every link between these hosts was measured from one end at least."""
        names = tuple(hosts)
        try:
            for source in names:
                for target in names:
                    self.hop_ms(source, target)
        except KeyError:
            return False
        return True


def _percentiles(times_ms: tuple[float, ...]) -> dict[str, float] | None:
    if not times_ms:
        return None
    # Only displays need percentiles: a measuring host does not import numpy.
    import numpy as np  # noqa: PLC0415

    p50, p90, p99 = (float(value) for value in np.percentile(times_ms, (50, 90, 99)))
    return {"p50": p50, "p90": p90, "p99": p99, "min": min(times_ms)}
