"""Grammar graph over bytes, with the checks for left recursion and recursion depth.

Each rule becomes a fragment of a non-deterministic automaton (Thompson 1968) whose edges read bytes, with one
addition: a node can call another rule and continue after it. So a position in a text is a node and a stack of
nodes to return to. A call at the end of a rule needs no return: right recursion takes no memory.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from stages.grammar.gbnf_parser import (
    MAX_NODES,
    Chars,
    Choice,
    Expression,
    Literal,
    Ref,
    Repeat,
    Token,
    byte_sequences,
    refusal,
)
from stages.grammar.gbnf_parser import Sequence as SequenceNode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Call = tuple[int, int]

ROOT: Final = "root"
END: Final = 0
"""The node at the end of every rule."""
_MAX_VISITS: Final = 2_000_000
# A small model that has begun to nest often never stops. So a grammar whose rules call themselves is followed
# only to `MAX_RECURSION` nested calls, and text that could not end within them is not offered: where the next
# bracket would open one too many, only closing ones remain.
#
# A call nests if its rule can come back to the caller and something must follow in the caller, as `)` does in
# `sum ::= "(" sum ")"`. A call at the end, as in `list ::= item list`, only repeats. Of the calls on one path
# from a rule back to itself one counts, however long the path through the properties of an object.
_MAX_CALL_VISITS: Final = 300_000
NEVER: Final = 1 << 30
"""The need of what has no end at all."""


class Kind(IntEnum):
    """Kind of a node.

    END returns from a rule. BYTE reads a byte of `sets[payload]` and goes to `following`. CALL runs the rule
    that begins at `entries[payload]` and continues at `following`. SPLIT goes to each of `branches[payload]`
    without reading.
    """

    END = 0
    BYTE = 1
    CALL = 2
    SPLIT = 3


@dataclass(frozen=True)
class Graph:
    """Nodes of a grammar, by number."""

    kinds: list[Kind]
    """Kind of each node."""
    payloads: list[int]
    """See `Kind`."""
    followings: list[int]
    """See `Kind`."""
    sets: list[int]
    """Sets of bytes: bit `b` tells whether byte `b` is in it."""
    branches: list[tuple[int, ...]]
    """Targets of SPLITs."""
    entries: list[int]
    """First node of each rule."""
    names: list[str]
    """Names of the rules; rules made for a repetition have the name of their rule."""
    callers: dict[int, int]
    """Rule of each CALL, by node."""
    root: int
    """The rule that a text must match."""


class _Builder:
    """Builds from the end of a rule to its beginning: each part gets the node that follows it."""

    def __init__(self, names: list[str]) -> None:
        self._kinds = [Kind.END]
        self._payloads = [0]
        self._followings = [END]
        self._sets: dict[int, int] = {}
        self._branches: list[tuple[int, ...]] = []
        self._names = names
        self._rules = {name: number for number, name in enumerate(names)}
        self._entries = [END] * len(names)
        # Equal steps to the same node are shared.
        self._bytes: dict[tuple[int, int], int] = {}
        self._callers: dict[int, int] = {}
        self._current = ROOT
        # As `_current`, but for rules made for a repetition within it.
        self._caller = 0

    def add_rule(self, name: str, expression: Expression) -> None:
        self._current = name
        self._add_fragment(self._rules[name], expression)

    def _add_fragment(self, rule: int, expression: Expression) -> None:
        outer, self._caller = self._caller, rule
        self._entries[rule] = self._build(expression, END)
        self._caller = outer

    def graph(self) -> Graph:
        return Graph(
            self._kinds,
            self._payloads,
            self._followings,
            list(self._sets),
            self._branches,
            self._entries,
            self._names,
            self._callers,
            self._rules[ROOT],
        )

    def _build(self, expression: Expression, following: int) -> int:
        match expression:
            case Literal() | Token():
                code = expression.code if isinstance(expression, Token) else expression.text.encode()
                for byte in reversed(code):
                    following = self._byte(1 << byte, following)
                return following
            case Chars(ranges):
                return self._chars(ranges, following)
            case Ref(name):
                if name not in self._rules:
                    raise refusal(f"the rule `{self._current}` refers to `{name[:64]}`, which is not defined")
                node = self._add(Kind.CALL, self._rules[name], following)
                self._callers[node] = self._caller
                return node
            case SequenceNode(items):
                for item in reversed(items):
                    following = self._build(item, following)
                return following
            case Choice(options):
                return self._split([self._build(option, following) for option in options])
            case Repeat(item, least, most):
                return self._repeat(item, least, most, following)

    def _chars(self, ranges: tuple[tuple[int, int], ...], following: int) -> int:
        starts: dict[int, int] = {}
        for sequence in byte_sequences(ranges):
            target = following
            for low, high in reversed(sequence[1:]):
                target = self._byte(_span(low, high), target)
            starts[target] = starts.get(target, 0) | _span(*sequence[0])
        return self._split([self._byte(each, target) for target, each in starts.items()])

    def _repeat(self, item: Expression, least: int, most: int | None, following: int) -> int:
        if (most is None or most > 1 or least > 1) and not _is_one_step(item):
            item = self._as_rule(item)
        if most is None:
            loop = self._add(Kind.SPLIT, len(self._branches), END)
            self._branches.append(())
            self._branches[self._payloads[loop]] = (self._build(item, loop), following)
            start = loop
        else:
            start = following
            for _ in range(most - least):
                start = self._split([self._build(item, start), following])
        for _ in range(least):
            start = self._build(item, start)
        return start

    def _as_rule(self, item: Expression) -> Expression:
        """A reference to a rule with the same content: a copy is then a single node."""
        if isinstance(item, Ref):
            return item
        name = f"{self._current}/{len(self._names)}"
        self._rules[name] = len(self._names)
        self._names.append(self._current)
        self._entries.append(END)
        self._add_fragment(self._rules[name], item)
        return Ref(name)

    def _byte(self, members: int, following: int) -> int:
        key = (members, following)
        node = self._bytes.get(key)
        if node is None:
            number = self._sets.setdefault(members, len(self._sets))
            node = self._bytes[key] = self._add(Kind.BYTE, number, following)
        return node

    def _split(self, targets: list[int]) -> int:
        if len(targets) == 1:
            return targets[0]
        self._branches.append(tuple(targets))
        return self._add(Kind.SPLIT, len(self._branches) - 1, END)

    def _add(self, kind: Kind, payload: int, following: int) -> int:
        if len(self._kinds) >= MAX_NODES:
            raise refusal(f"it needs more than {MAX_NODES} nodes: use fewer repetitions, or make it smaller")
        self._kinds.append(kind)
        self._payloads.append(payload)
        self._followings.append(following)
        return len(self._kinds) - 1


@dataclass(frozen=True)
class Recursion:
    """Nesting of a graph."""

    nests: Sequence[bool]
    """For each node, whether it is a nesting call."""
    needs: Sequence[int]
    """For each node, least number of nesting calls that must be open within each other on a path from it to
    the end of its rule; `NEVER` if there is no path."""


def build_graph(rules: Mapping[str, Expression]) -> Graph:
    """The graph of some rules, one of them named `root`.

    Raises:
        InvalidRequest: If a rule is missing, or the graph would be too large.
    """
    if ROOT not in rules:
        raise refusal(f"it has no rule `{ROOT}`, which every text must match: add one")
    builder = _Builder(list(rules))
    for name, expression in rules.items():
        builder.add_rule(name, expression)
    return builder.graph()


def _is_one_step(item: Expression) -> bool:
    """Whether a copy of it is a single node."""
    return isinstance(item, Chars) and item.ranges[-1][1] < 0x80


def _span(low: int, high: int) -> int:
    """The set of the bytes from `low` to `high`."""
    return (1 << (high + 1)) - (1 << low)


def refuse_left_recursion(graph: Graph) -> None:
    """Check that no rule can call itself without reading a byte.

    Raises:
        InvalidRequest: Naming such a rule, or if the check takes too long.
    """
    calls = _first_calls(graph)
    order: dict[int, int] = {}  # 1: in progress, 2: done
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
                    f"the rule `{graph.names[following]}` is left-recursive: it reaches itself again before"
                    " any character; write it as a repetition or as a right-recursive rule"
                )
            elif not order.get(following):
                order[following] = 1
                path.append((following, iter(calls[following])))


def _first_calls(graph: Graph) -> Sequence[Sequence[int]]:
    """For each rule, the rules that it can call before it has read a byte."""
    count = len(graph.entries)
    calls: list[list[int]] = [[] for _ in range(count)]
    can_be_empty = [False] * count
    # Nodes after a call, waiting for whether the called rule can be empty, with the rule of their walk.
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
            raise refusal("the check for left recursion takes too long: make it smaller")
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


def recursion_of(graph: Graph) -> Recursion:
    """Analyse a graph."""
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
    """A set of nesting calls so that every path from a rule to itself has one: those that close a circle.

    More of them where finding a smaller set would take long.
    """
    called = _called(num_rules, repeating)
    counted: set[Call] = set()
    num_visits = 0
    for caller, rule in nesting:
        seen, todo = {rule}, deque([rule])
        while todo and caller not in seen and num_visits < _MAX_CALL_VISITS:
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
    """Knuth's generalisation of Dijkstra's algorithm (1977): the least value comes first and is final."""
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
                # The value needs both the called rule's and the following node's.
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
