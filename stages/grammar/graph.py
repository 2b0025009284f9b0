"""A grammar as a graph of byte-wise steps, ready to be run.

Each rule becomes a fragment of a non-deterministic automaton (Thompson 1968) whose edges read bytes, with one
addition: a node can call another rule and go on behind it. So a position in a text is a node and a stack of
nodes to return to. A call at the very end of a rule returns to nothing: rules that repeat themselves on the
right take no room.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from stages.grammar.limits import MAX_NODES, refusal
from stages.grammar.syntax import Chars, Choice, Expression, Literal, Ref, Repeat, Sequence
from stages.grammar.utf8_ranges import byte_sequences

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = "root"
END: Final = 0
"""The node at the end of every rule."""


class Kind(IntEnum):
    """What a node does.

    END returns from a rule. BYTE reads a byte out of `sets[payload]` and goes to `following`. CALL runs the
    rule that begins at `entries[payload]` and goes on at `following`. SPLIT goes to each of
    `branches[payload]` without reading.
    """

    END = 0
    BYTE = 1
    CALL = 2
    SPLIT = 3


@dataclass(frozen=True)
class Graph:
    """Nodes by number, and what they refer to.

    Attributes:
        kinds: What each node does.
        payloads: See `Kind`.
        followings: See `Kind`.
        sets: Sets of bytes: bit `b` tells whether byte `b` is in it.
        branches: Targets of SPLITs.
        entries: First node of each rule.
        names: Of the rules; those that were made for a repetition have the name of their rule.
        callers: The rule that each CALL stands in, by node.
        root: The rule that a text must match.
    """

    kinds: list[Kind]
    payloads: list[int]
    followings: list[int]
    sets: list[int]
    branches: list[tuple[int, ...]]
    entries: list[int]
    names: list[str]
    callers: dict[int, int]
    root: int


def build_graph(rules: Mapping[str, Expression]) -> Graph:
    """The graph of some rules, of which one is called `root`.

    Raises:
        InvalidRequest: If a rule is missing, or the graph would be too large.
    """
    if ROOT not in rules:
        raise refusal(f"it has no rule `{ROOT}`, with which every text must begin: name one so")
    builder = _Builder(list(rules))
    for name, expression in rules.items():
        builder.add_rule(name, expression)
    return builder.graph()


class _Builder:
    """Builds from the end of a rule to its beginning: each part is told which node comes behind it."""

    def __init__(self, names: list[str]) -> None:
        self._kinds = [Kind.END]
        self._payloads = [0]
        self._followings = [END]
        self._sets: dict[int, int] = {}
        self._branches: list[tuple[int, ...]] = []
        self._names = names
        self._rules = {name: number for number, name in enumerate(names)}
        self._entries = [END] * len(names)
        # Equal steps to the same place are one step.
        self._bytes: dict[tuple[int, int], int] = {}
        self._callers: dict[int, int] = {}
        self._current = ROOT
        # As `_current`, but for rules that are made for a repetition within it.
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
            case Literal(text):
                for byte in reversed(text.encode()):
                    following = self._byte(1 << byte, following)
                return following
            case Chars(ranges):
                return self._chars(ranges, following)
            case Ref(name):
                if name not in self._rules:
                    raise refusal(f"the rule `{self._current}` refers to `{name[:64]}`, which is not there")
                node = self._add(Kind.CALL, self._rules[name], following)
                self._callers[node] = self._caller
                return node
            case Sequence(items):
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
        """A reference to what says the same: a copy of it is one node then."""
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
            raise refusal(f"it comes to more than {MAX_NODES} steps: repeat less, or make it smaller")
        self._kinds.append(kind)
        self._payloads.append(payload)
        self._followings.append(following)
        return len(self._kinds) - 1


def _is_one_step(item: Expression) -> bool:
    """Whether a copy of it is one node anyway."""
    return isinstance(item, Chars) and item.ranges[-1][1] < 0x80


def _span(low: int, high: int) -> int:
    """The set of the bytes from `low` to `high`."""
    return (1 << (high + 1)) - (1 << low)
