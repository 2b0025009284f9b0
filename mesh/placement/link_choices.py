"""Choices by measured links: the order of stages, and formats of hidden states.

A token goes from the coordinator to the first stage, from stage to stage, and from the tail back to the
coordinator: a closed tour, so the best order is a shortest tour. For up to ten hosts it is found exactly, by
dynamic programming over sets of visited hosts (Held and Karp 1962); beyond, a tour from nearest host to
nearest host is shortened by reversing parts of it while that helps (2-opt, Croes 1958).

In a full pipeline a row of hidden states is on the link while the stages compute the next: as long as that
takes no longer than computing a row, the link delays nothing, and exact float32 costs nothing. Batches and
chunks lengthen both alike, so one row decides. The round trip does not matter here: it is the same for every
type.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import TYPE_CHECKING, Any, Final

from mesh.placement.gpu_layers import SLOWEST_GB_PER_S
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.links import Links
    from mesh.placement.memory_estimate import StageSizes
    from mesh.placement.planner import Plan

_MAX_EXACT: Final = 10
# Least gain of a shorter round: two measurements of one link differ by more than less.
LEAST_GAIN: Final = 0.05
# A round through fewer hosts, the head among them, is the same in any order.
_FEWEST_FOR_AN_ORDER: Final = 4
# Hidden states travel as float32 unless the operator chooses otherwise.
HIDDEN_VALUE_BYTES: Final = 4


@dataclass(frozen=True)
class RoundTimes:
    """Round trip times of a token on the wire, as placed and with the best order."""

    order: tuple[str, ...]
    """Hosts, in pipeline order."""
    order_ms: float
    """Round trip in this order."""
    best: tuple[str, ...]
    """The hosts in the best order."""
    best_ms: float
    """Round trip in that order."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "order": list(self.order),
            "order_ms": self.order_ms,
            "best": list(self.best),
            "best_ms": self.best_ms,
        }


@dataclass(frozen=True)
class OrderedPlan:
    """A plan whose hosts are in the best order for the links."""

    plan: Plan
    """Plan of the same model on the same hosts."""
    round_ms: float
    """Round trip of a token with it."""
    as_joined_ms: float
    """Round trip with the former plan."""


@dataclass(frozen=True)
class WireChoice:
    """Proposed wire type of one link between stages."""

    source: str
    """Host of the stage that sends."""
    target: str
    """Host of the stage that receives."""
    transfer_ms: float
    """Time of a float32 row on the link."""
    compute_ms: float
    """Time of a row at the slowest stage."""
    proposed: HiddenType
    """The most exact type with which the link delays nothing; the smallest if none does."""

    @property
    def is_bottleneck(self) -> bool:
        """Whether float32 makes the link the slowest part of the pipeline."""
        return self.proposed is not HiddenType.F32

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "from": self.source,
            "to": self.target,
            "row_transfer_ms": self.transfer_ms,
            "row_compute_ms": self.compute_ms,
            "proposed": str(self.proposed),
        }


def round_ms(order: Sequence[str], head: str, hop_ms: Callable[[str, str], float]) -> float:
    """Time of a token's round trip on the wire, in ms.

    Args:
        order: Hosts of the stages, in pipeline order; a host of several adjacent stages counts once.
        head: The coordinator's host; it may hold stages too.
        hop_ms: One-way time from one host to another.
    """
    return sum(hop_ms(a, b) for a, b in pairwise([head, *order, head]))


def best_order(hosts: Sequence[str], head: str, hop_ms: Callable[[str, str], float]) -> tuple[str, ...]:
    """The hosts in the order with the shortest round trip.

    Args:
        hosts: In the order in which they joined, which is kept unless another is clearly shorter.
        head: The coordinator's host; it may be one of them.
        hop_ms: One-way time from one host to another, at least 0.
    """
    come = tuple(hosts)
    search = _exact if len(come) <= _MAX_EXACT else _improved
    found = search(come, head, hop_ms)
    kept_ms, found_ms = (round_ms(order, head, hop_ms) for order in (come, found))
    return found if found_ms < kept_ms * (1 - LEAST_GAIN) else come


def _exact(hosts: tuple[str, ...], head: str, hop_ms: Callable[[str, str], float]) -> tuple[str, ...]:
    if not hosts:
        return ()
    indices = range(len(hosts))
    between = [[hop_ms(a, b) for b in hosts] for a in hosts]
    # By the set of visited hosts, a bit for each, and the last of them: length of the shortest path from the
    # head, and the last host but one.
    ways: dict[tuple[int, int], tuple[float, int]] = {
        (1 << index, index): (hop_ms(head, hosts[index]), index) for index in indices
    }
    for met in range(1, 1 << len(hosts)):
        members = [index for index in indices if met >> index & 1]
        if len(members) == 1:
            continue
        for last in members:
            before = met & ~(1 << last)
            ways[met, last] = min(
                (ways[before, mid][0] + between[mid][last], mid) for mid in members if mid != last
            )
    met = (1 << len(hosts)) - 1
    # Of a tour and its reverse, the one that begins with the host that joined first.
    last = min(indices, key=lambda index: (ways[met, index][0] + hop_ms(hosts[index], head), -index))
    order = []
    while met:
        order.append(hosts[last])
        met, last = met & ~(1 << last), ways[met, last][1]
    return tuple(reversed(order))


def _improved(hosts: tuple[str, ...], head: str, hop_ms: Callable[[str, str], float]) -> tuple[str, ...]:
    left = list(hosts)
    order: list[str] = []
    while left:
        here = order[-1] if order else head
        order.append(left.pop(min(range(len(left)), key=lambda index: hop_ms(here, left[index]))))
    way = [head, *order, head]
    is_better = True
    while is_better:
        is_better = False
        there, back = _sums(way, hop_ms)
        for start, stop in combinations(range(len(order) + 1), 2):
            # The hosts between `way[start]` and `way[stop + 1]` are visited in reverse.
            as_it_is = there[stop + 1] - there[start]
            turned = (
                hop_ms(way[start], way[stop])
                + back[stop]
                - back[start + 1]
                + hop_ms(way[start + 1], way[stop + 1])
            )
            if turned < as_it_is - 1e-9:
                way[start + 1 : stop + 1] = reversed(way[start + 1 : stop + 1])
                there, back = _sums(way, hop_ms)
                is_better = True
    return tuple(way[1:-1])


def _sums(way: Sequence[str], hop_ms: Callable[[str, str], float]) -> tuple[list[float], list[float]]:
    """Length of the path from its beginning to each host, and the same in reverse."""
    there = accumulate((hop_ms(a, b) for a, b in pairwise(way)), initial=0.0)
    back = accumulate((hop_ms(b, a) for a, b in pairwise(way)), initial=0.0)
    return list(there), list(back)


def by_links(
    hosts: Sequence[HostCapacity], chosen: Iterable[str], head: str, links: Links
) -> list[HostCapacity]:
    """The same hosts, those of a plan first, in the order with the shortest round trip.

    The planner keeps the order of the hosts that it is given, where nothing speaks against it.
    """
    by_name = {host.name: host for host in hosts}
    first = best_order(tuple(dict.fromkeys(chosen)), head, links.hop_ms)
    return [by_name[name] for name in dict.fromkeys((*first, *by_name))]


def round_times(order: Sequence[str], head: str, links: Links) -> RoundTimes | None:
    """Round trips of stages on these hosts; None unless all their links were measured."""
    hosts = tuple(dict.fromkeys(order))
    if not hosts or not links.knows((head, *hosts)):
        return None
    best = best_order(hosts, head, links.hop_ms)
    return RoundTimes(hosts, round_ms(hosts, head, links.hop_ms), best, round_ms(best, head, links.hop_ms))


def hosts_of(plan: Plan) -> tuple[str, ...]:
    """Hosts in pipeline order, each once."""
    return tuple(dict.fromkeys(stage.host for stage in plan.stages))


def has_an_order(plan: Plan, head: str) -> bool:
    """Whether the order of a plan's hosts can matter."""
    return len({head, *hosts_of(plan)}) >= _FEWEST_FOR_AN_ORDER


def ordered_by_links(
    hosts: Sequence[HostCapacity],
    as_joined: Plan,
    place: Callable[[Sequence[HostCapacity]], Plan],
    head: str,
    links: Links,
) -> OrderedPlan | None:
    """The plan with its hosts in the best order, or as it is if no order is better.

    Args:
        hosts: In the order in which they joined.
        as_joined: Plan for them in that order.
        place: Makes a plan for hosts in an order.
        head: The coordinator's host.
        links: Links between all of them.

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


def wire_choices(
    hosts: Sequence[str],
    compute_ms: Sequence[float],
    n_embd: int,
    bytes_per_s: Callable[[str, str], float | None],
) -> tuple[WireChoice | None, ...]:
    """Proposed wire types of the links between stages.

    Args:
        hosts: Hosts of the stages, in pipeline order.
        compute_ms: Time of a row at each stage.
        n_embd: Number of values of a row of hidden states.
        bytes_per_s: Bandwidth from one host to another; None if it is not known.

    Returns:
        One for each stage; None for the tail, between stages of one host, and where the bandwidth is unknown.
    """
    slowest_ms = max(compute_ms)
    choices: list[WireChoice | None] = []
    for source, target in pairwise(hosts):
        rate = None if source == target else bytes_per_s(source, target)
        choices.append(None if not rate else _choice(source, target, slowest_ms, n_embd, rate))
    return (*choices, None)


def transfer_ms(hidden_type: HiddenType, n_embd: int, bytes_per_s: float) -> float:
    """Time of one row on a link, without the delay of the link."""
    return hidden_type.row_bytes(n_embd) / bytes_per_s * 1e3


def _choice(source: str, target: str, compute_ms: float, n_embd: int, rate: float) -> WireChoice:
    fitting = (wire for wire in HiddenType if transfer_ms(wire, n_embd, rate) <= compute_ms)
    return WireChoice(
        source,
        target,
        transfer_ms(HiddenType.F32, n_embd, rate),
        compute_ms,
        next(fitting, min(HiddenType, key=lambda wire: wire.row_bytes(n_embd))),
    )


def planned_wires(
    plan: Plan, sizes: StageSizes, speeds_gb_per_s: Mapping[str, float], links: Links
) -> tuple[WireChoice | None, ...]:
    """Proposed wire types of the links between the stages of a plan.

    A row at a stage counts as long as its host needs to read the stage's weights, which is the time of a
    token alone; in a batch rows take less, so a link that is just fast enough here may still delay a full
    pipeline.

    Args:
        plan: Placement of the stages.
        sizes: Sizes of the plan's model.
        speeds_gb_per_s: Speeds at which hosts read weights.
        links: Links with their bandwidths.

    Returns:
        One for each stage; None for the tail, between stages of one host, and where nothing was measured.
    """
    compute_ms = [
        sizes.read_bytes(stage.layers) / max(speeds_gb_per_s.get(stage.host, 0.0), SLOWEST_GB_PER_S) / 1e6
        for stage in plan.stages
    ]
    rates = {(link.source, link.target): link.bytes_per_s for link in links.links}
    return wire_choices(
        [stage.host for stage in plan.stages],
        compute_ms,
        sizes.model.hidden_width,
        lambda source, target: rates.get((source, target)),
    )
