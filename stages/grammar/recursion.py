"""How deep rules may stand within themselves: a bound that lets every text be ended.

A small model that has begun to nest often never stops. So a grammar whose rules call themselves is followed
only to `MAX_RECURSION` of such calls within each other, and what could not be brought to its end within them
is not offered: where the next bracket would open one too many, only what closes remains.

A call nests if its rule can come back to the caller and something must follow in the caller, as `)` does in
`sum ::= "(" sum ")"`. A call at the very end, as in `list ::= item list`, only repeats. Of the calls on one
way from a rule back to itself one counts, whatever detours an object takes through its properties.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stages.grammar.graph import END, Graph, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Call = tuple[int, int]

_MAX_VISITS: Final = 300_000

NEVER: Final = 1 << 30
"""The need of what has no end at all."""


@dataclass(frozen=True)
class Recursion:
    """What a graph's nesting comes to.

    Attributes:
        nests: For each node, whether it is a call that counts.
        needs: For each node, how many calls that count must at least be open within each other on the way
            from it to the end of its rule; `NEVER` if there is no way.
    """

    nests: Sequence[bool]
    needs: Sequence[int]


def recursion_of(graph: Graph) -> Recursion:
    """Look at a graph, once."""
    nodes = [node for node, kind in enumerate(graph.kinds) if kind is Kind.CALL]
    call_of = {node: (graph.callers[node], graph.payloads[node]) for node in nodes}
    circle_of = _circles(len(graph.entries), call_of.values())
    returning = {node: call for node, call in call_of.items() if circle_of[call[0]] == circle_of[call[1]]}
    nesting = {node: call for node, call in returning.items() if graph.followings[node] != END}
    repeating = {call for node, call in returning.items() if node not in nesting}
    counted = _counted(len(graph.entries), repeating, dict.fromkeys(nesting.values()))
    nests = [False] * len(graph.kinds)
    for node, call in nesting.items():
        nests[node] = call in counted
    return Recursion(nests, _needs(graph, nests))


def _counted(num_rules: int, repeating: Iterable[Call], nesting: Iterable[Call]) -> set[Call]:
    """So many of the calls that nest that no way back is without one: those that close one, in turn.

    Where it would take long to find out, more of them.
    """
    called = _called(num_rules, repeating)
    counted: set[Call] = set()
    num_visits = 0
    for caller, rule in nesting:
        seen, todo = {rule}, deque([rule])
        while todo and caller not in seen and num_visits < _MAX_VISITS:
            for following in called[todo.popleft()]:
                num_visits += 1
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        if todo or caller in seen:
            counted.add((caller, rule))
        else:
            called[caller].append(rule)
    return counted


def _needs(graph: Graph, nests: Sequence[bool]) -> list[int]:
    """Knuth's generalisation of Dijkstra's algorithm (1977): the least comes first, and is final then."""
    users = _users(graph)
    needs = [NEVER] * len(graph.kinds)
    todo = [(0, END)]
    while todo:
        need, node = heapq.heappop(todo)
        if needs[node] != NEVER:
            continue
        needs[node] = need
        for user in users[node]:
            found = need
            if graph.kinds[user] is Kind.CALL:
                # What comes later of the rule and what follows it is at hand when the other one is.
                within = needs[graph.entries[graph.payloads[user]]] + nests[user]
                found = max(within, needs[graph.followings[user]])
            if found < needs[user]:
                heapq.heappush(todo, (found, user))
    return needs


def _users(graph: Graph) -> list[list[int]]:
    """For each node, those that lead to it or call it."""
    users: list[list[int]] = [[] for _ in graph.kinds]
    for node, kind in enumerate(graph.kinds):
        if kind is Kind.SPLIT:
            for target in graph.branches[graph.payloads[node]]:
                users[target].append(node)
        elif kind is not Kind.END:
            users[graph.followings[node]].append(node)
        if kind is Kind.CALL:
            users[graph.entries[graph.payloads[node]]].append(node)
    return users


def _circles(num_rules: int, calls: Iterable[Call]) -> list[int]:
    """The number of each rule's strongly connected component (Tarjan 1972), without recursion."""
    called = _called(num_rules, calls)
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    found = [-1] * num_rules
    unfinished: list[int] = []
    for start in range(num_rules):
        todo = [start]
        while todo:
            rule = todo[-1]
            if rule not in order:
                order[rule] = lowest[rule] = len(order)
                unfinished.append(rule)
                todo += [following for following in called[rule] if following not in order]
                continue
            todo.pop()
            if found[rule] != -1:
                continue
            within = [following for following in called[rule] if found[following] == -1]
            lowest[rule] = min(lowest[rule], *(lowest[following] for following in within), order[rule])
            if lowest[rule] == order[rule]:
                while found[rule] == -1:
                    found[unfinished.pop()] = rule
    return found


def _called(num_rules: int, calls: Iterable[Call]) -> list[list[int]]:
    called: list[list[int]] = [[] for _ in range(num_rules)]
    for caller, rule in calls:
        called[caller].append(rule)
    return called
