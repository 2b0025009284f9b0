"""Which order of the stages makes a token's round shortest. Pure.

A token goes from the coordinator to the first stage, on from stage to stage, and from the tail back to the
coordinator: a closed tour, so the best order is a shortest tour. Up to ten hosts it is found exactly, by
dynamic programming over the sets of hosts that a way has met (Held and Karp 1962); beyond, a tour from
nearest host to nearest host is shortened as long as turning a part of it round helps (2-opt, Croes 1958).
"""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_EXACT: Final = 10
# A shorter round must be shorter by more than that share: two measurements of one link differ by more.
LEAST_GAIN: Final = 0.05


def round_ms(order: Sequence[str], head: str, hop_ms: Callable[[str, str], float]) -> float:
    """How long a token's round is on the wire.

    Args:
        order: Hosts of the stages, in pipeline order; those that hold several follow one another once.
        head: The coordinator's host; it may hold stages too.
        hop_ms: One way from one host to another.
    """
    return sum(hop_ms(a, b) for a, b in pairwise([head, *order, head]))


def best_order(hosts: Sequence[str], head: str, hop_ms: Callable[[str, str], float]) -> tuple[str, ...]:
    """The hosts in the order that makes the round shortest.

    Args:
        hosts: In the order in which they came, which is kept unless another is clearly shorter.
        head: The coordinator's host; it may be one of them.
        hop_ms: One way from one host to another, at least 0.
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
    # By the set of hosts met, a bit for each, and the last of them: length of the shortest way from the head,
    # and who is last but one.
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
    # Of a round and the same the other way, that which begins with the host that came first.
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
            # Between `way[start]` and `way[stop + 1]` all are met the other way round.
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
    """How long the way is from its beginning to each host, and the same hosts the other way round."""
    there = accumulate((hop_ms(a, b) for a, b in pairwise(way)), initial=0.0)
    back = accumulate((hop_ms(b, a) for a, b in pairwise(way)), initial=0.0)
    return list(there), list(back)
