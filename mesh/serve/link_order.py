"""Hosts in the order in which the links between them make a token's round shortest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.hop_order import best_order, round_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mesh.cluster.links import Links
    from mesh.host_capacity import HostCapacity
    from mesh.planner import Plan

# A round through fewer hosts, the head among them, is the same in any order.
_FEWEST_FOR_AN_ORDER: Final = 4


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


@dataclass(frozen=True)
class OrderedPlan:
    """A plan whose hosts stand in the order that suits the links.

    Attributes:
        plan: Of the same model, on the same hosts.
        round_ms: A token's round on the wire with it.
        as_joined_ms: With the plan as it was before.
    """

    plan: Plan
    round_ms: float
    as_joined_ms: float


def hosts_of(plan: Plan) -> tuple[str, ...]:
    """In pipeline order, each once."""
    return tuple(dict.fromkeys(stage.host for stage in plan.stages))


def has_an_order(plan: Plan, head: str) -> bool:
    """Whether the order of a plan's hosts can matter at all."""
    return len({head, *hosts_of(plan)}) >= _FEWEST_FOR_AN_ORDER


def ordered_by_links(
    hosts: Sequence[HostCapacity],
    as_joined: Plan,
    place: Callable[[Sequence[HostCapacity]], Plan],
    head: str,
    links: Links,
) -> OrderedPlan | None:
    """The plan again with its hosts in the best order, or as it is if no order is better.

    Args:
        hosts: In the order in which they joined.
        as_joined: Made of them.
        place: Makes a plan of hosts in an order.
        head: The coordinator's host.
        links: Between all of them.

    Returns:
        None if some links were not measured.
    """
    before = round_times(hosts_of(as_joined), head, links)
    if before is None:
        return None
    found = place(by_links(hosts, hosts_of(as_joined), head, links))
    after = round_times(hosts_of(found), head, links)
    if after is None or after.order_ms >= before.order_ms:
        return OrderedPlan(as_joined, before.order_ms, before.order_ms)
    return OrderedPlan(found, after.order_ms, before.order_ms)
