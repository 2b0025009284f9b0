"""Which order of the stages makes a token's round shortest. Pure.

A token goes from the coordinator to the first stage, on from stage to stage, and from the tail back to the
coordinator: a closed tour, so the best order is a shortest tour. Up to ten hosts it is found exactly, by
dynamic programming over the sets of hosts that a way has met (Held and Karp 1962); beyond, a tour from
nearest host to nearest host is shortened as long as turning a part of it round helps (2-opt, Croes 1958).
"""

from __future__ import annotations

from itertools import combinations, pairwise
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
    # By the set of hosts met and the last of them: length of the shortest way from the head, and that way.
    ways: dict[tuple[frozenset[int], int], tuple[float, tuple[int, ...]]] = {
        (frozenset({index}), index): (hop_ms(head, hosts[index]), (index,)) for index in indices
    }
    for size in range(2, len(hosts) + 1):
        for met in map(frozenset, combinations(indices, size)):
            for last in met:
                before = met - {last}
                ways[met, last] = min(
                    (ways[before, mid][0] + hop_ms(hosts[mid], hosts[last]), (*ways[before, mid][1], last))
                    for mid in before
                )
    everybody = frozenset(indices)
    _, way = min(
        (ways[everybody, last][0] + hop_ms(hosts[last], head), ways[everybody, last][1]) for last in indices
    )
    return tuple(hosts[index] for index in way)


def _improved(hosts: tuple[str, ...], head: str, hop_ms: Callable[[str, str], float]) -> tuple[str, ...]:
    left = list(hosts)
    order: list[str] = []
    while left:
        here = order[-1] if order else head
        order.append(left.pop(min(range(len(left)), key=lambda index: hop_ms(here, left[index]))))
    best_ms = round_ms(order, head, hop_ms)
    is_better = True
    while is_better:
        is_better = False
        for start, stop in combinations(range(len(order) + 1), 2):
            turned = [*order[:start], *reversed(order[start:stop]), *order[stop:]]
            turned_ms = round_ms(turned, head, hop_ms)
            if turned_ms < best_ms - 1e-9:
                order, best_ms, is_better = turned, turned_ms, True
    return tuple(order)
