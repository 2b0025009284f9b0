"""Grammars that call themselves before they read anything: no position in a text would be an end to that."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from stages.grammar.graph import Graph, Kind
from stages.grammar.limits import refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_VISITS: Final = 2_000_000


def refuse_left_recursion(graph: Graph) -> None:
    """Check that no rule can come to itself again without reading a byte.

    Raises:
        InvalidRequest: Naming a rule that does, or if finding out takes too long.
    """
    calls = _first_calls(graph)
    order: dict[int, int] = {}  # 1: being looked at, 2: done
    for start in range(len(graph.entries)):
        path = [(start, iter(calls[start]))]
        if order.get(start):
            continue
        order[start] = 1
        while path:
            rule, remaining = path[-1]
            following = next(remaining, None)
            if following is None:
                order[rule] = 2
                path.pop()
            elif order.get(following) == 1:
                raise refusal(
                    f"the rule `{graph.names[following]}` is left-recursive: it comes to itself again before"
                    " any character; write it as a repetition or recursive on the right"
                )
            elif not order.get(following):
                order[following] = 1
                path.append((following, iter(calls[following])))


def _first_calls(graph: Graph) -> Sequence[Sequence[int]]:
    """For each rule, those that it can call before it has read a byte."""
    count = len(graph.entries)
    calls: list[list[int]] = [[] for _ in range(count)]
    can_be_empty = [False] * count
    # Who waits for whether a rule can be empty: nodes behind a call of it, and whose walk they belong to.
    waiting: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    seen: list[set[int]] = [set() for _ in range(count)]
    todo = deque((rule, entry) for rule, entry in enumerate(graph.entries))
    num_visits = 0
    while todo:
        rule, node = todo.popleft()
        if node in seen[rule]:
            continue
        seen[rule].add(node)
        num_visits += 1
        if num_visits > _MAX_VISITS:
            raise refusal("it is too entangled: make it smaller")
        kind, payload = graph.kinds[node], graph.payloads[node]
        if kind is Kind.END and not can_be_empty[rule]:
            can_be_empty[rule] = True
            todo.extend(waiting[rule])
        elif kind is Kind.SPLIT:
            todo.extend((rule, target) for target in graph.branches[payload])
            num_visits += len(graph.branches[payload])
        elif kind is Kind.CALL:
            calls[rule].append(payload)
            behind = (rule, graph.followings[node])
            waiting[payload].append(behind)
            if can_be_empty[payload]:
                todo.append(behind)
    return calls
