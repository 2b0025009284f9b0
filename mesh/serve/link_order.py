"""Hosts in the order in which the links between them make a token's round shortest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh.hop_order import best_order, round_ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mesh.cluster.links import Links
    from mesh.planner import HostCapacity


@dataclass(frozen=True)
class RoundTimes:
    """How long a token's round is on the wire.

    Attributes:
        order: Hosts, in pipeline order.
        order_ms: With the stages in this order.
        best: The hosts in the best order.
        best_ms: With the stages in that order.
    """

    order: tuple[str, ...]
    order_ms: float
    best: tuple[str, ...]
    best_ms: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "order": list(self.order),
            "order_ms": self.order_ms,
            "best": list(self.best),
            "best_ms": self.best_ms,
        }


def by_links(
    hosts: Sequence[HostCapacity], chosen: Iterable[str], head: str, links: Links
) -> list[HostCapacity]:
    """The same hosts, those that a plan has chosen first, in the order best for the wire.

    The planner keeps the order in which it is given hosts, where nothing speaks against it.
    """
    by_name = {host.name: host for host in hosts}
    first = best_order(tuple(dict.fromkeys(chosen)), head, links.hop_ms)
    return [by_name[name] for name in dict.fromkeys((*first, *by_name))]


def round_times(order: Sequence[str], head: str, links: Links) -> RoundTimes | None:
    """Of stages on these hosts; None unless all their links were measured."""
    hosts = tuple(dict.fromkeys(order))
    if not hosts or not links.knows((head, *hosts)):
        return None
    best = best_order(hosts, head, links.hop_ms)
    return RoundTimes(hosts, round_ms(hosts, head, links.hop_ms), best, round_ms(best, head, links.hop_ms))
