"""Automaton: deterministic, over a grammar graph, built lazily.

A state is a set of configurations: each a node that reads a byte, and a stack of nodes to return to. States
and stacks are numbered when they first occur, and transitions are cached, as in a lazily built DFA. So a
number always means the same state: a rollback uses an older number, and nothing has to be copied or undone
for a rejected token.

Bytes that no rule distinguishes form a class, so a step is one lookup in a table of states and classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from stages.grammar.gbnf_parser import (
    MAX_CONFIGS,
    MAX_DRAW_WORK,
    MAX_RECURSION,
    MAX_STATES,
    MAX_TABLE_CELLS,
    refusal,
)
from stages.grammar.graph import END, Graph, Kind, recursion_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEAD: Final = -1
"""The state of a text that the grammar does not know."""

_UNKNOWN: Final = -2
_FIRST_CAPACITY: Final = 64
_BOTTOM: Final = 0

Config = tuple[int, int]


class Automaton:
    """Automaton of one grammar. For one thread at a time.

    Args:
        graph: Without left recursion.
        most_recursion: Most nesting calls (see `recursion_of`) that may be open within each other.

    Raises:
        InvalidRequest: If no text of it ends within that bound.

    Attributes:
        start: The state before any text.
        class_of_byte: int64, shape (256,).
        work: Elementary steps so far.
        most_work: Bound of `work`, beyond which it refuses to continue; raised by the caller before each use.
    """

    def __init__(self, graph: Graph, *, most_recursion: int = MAX_RECURSION) -> None:
        self._graph = graph
        self.class_of_byte, members = _byte_classes(graph.sets)
        self._num_classes = len(members)
        self._members = members
        self._recursion = recursion_of(graph)
        self._most_recursion = most_recursion
        self._frames: list[Config] = [(END, _BOTTOM)]
        self._frame_ids: dict[tuple[int, int, bool], int] = {}
        # Of each frame: number of open nesting calls.
        self._depths: list[int] = [0]
        # Of each state: the sets of bytes that it reads, and the target of each.
        self._readings: list[list[tuple[int, list[Config]]]] = []
        self._may_end: list[bool] = []
        self._state_ids: dict[tuple[bool, frozenset[Config]], int] = {}
        self._table = np.full((_FIRST_CAPACITY, self._num_classes), _UNKNOWN, np.int32)
        self._most_states = min(MAX_STATES, MAX_TABLE_CELLS // self._num_classes)
        self.work = 0
        self.most_work = MAX_DRAW_WORK
        start = (graph.entries[graph.root], _BOTTOM)
        if not self._can_end(start):
            raise refusal(f"no text of it ends with rules nested at most {most_recursion} deep")
        self.start = self._state_of([start])

    @property
    def is_half_full(self) -> bool:
        """Whether a new session should get an automaton of its own."""
        return max(len(self._may_end), len(self._frames)) > self._most_states // 2

    def may_end(self, state: int) -> bool:
        """Whether a text may end here."""
        return state != DEAD and self._may_end[state]

    def after(self, state: int, text: bytes) -> int:
        """The state after some more bytes.

        Raises:
            InvalidRequest: If the grammar takes too much work.
        """
        for byte in text:
            if state == DEAD:
                break
            self.work += 1
            state = self._step(state, int(self.class_of_byte[byte]))
        return state

    def after_each(self, states: NDArray[np.int32], classes: NDArray[np.int64]) -> NDArray[np.int32]:
        """The state after one byte, for many states at once.

        Args:
            states: int32, shape (n,); `DEAD` stays `DEAD`.
            classes: int64, shape (n,): the class of each one's byte.

        Raises:
            InvalidRequest: If the grammar takes too much work.
        """
        is_dead = states == DEAD
        cells = states * np.int64(self._num_classes) + classes
        cells[is_dead] = 0
        found: NDArray[np.int32] = self._table.ravel()[cells]
        unknown = (found == _UNKNOWN) & ~is_dead
        if unknown.any():
            for cell in np.unique(cells[unknown]).tolist():
                self._step(*divmod(cell, self._num_classes))
            found = self._table.ravel()[cells]
        found[is_dead] = DEAD
        return found

    def _step(self, state: int, byte_class: int) -> int:
        known = int(self._table[state, byte_class])
        if known != _UNKNOWN:
            return known
        members = self._members[byte_class]
        readings = self._readings[state]
        self._count(len(readings))
        targets = [config for number, configs in readings if members >> number & 1 for config in configs]
        target = self._state_of(targets) if targets else DEAD
        self._table[state, byte_class] = target
        return target

    def _state_of(self, targets: list[Config]) -> int:
        """The state for these nodes, after all edges that read nothing."""
        graph = self._graph
        kinds, payloads, followings = graph.kinds, graph.payloads, graph.followings
        reading: list[Config] = []
        may_end = False
        seen = set(targets)
        todo = list(seen)
        while todo:
            node, frame = todo.pop()
            kind = kinds[node]
            more: list[Config]
            if kind is Kind.BYTE:
                reading.append((node, frame))
                continue
            if kind is Kind.SPLIT:
                more = [(target, frame) for target in graph.branches[payloads[node]]]
            elif kind is Kind.CALL:
                following = followings[node]
                inner = frame if following == END else self._frame(node, frame)
                more = [(graph.entries[payloads[node]], inner)]
            elif frame == _BOTTOM:
                may_end = True
                continue
            else:
                more = [self._frames[frame]]
            for config in more:
                if config not in seen and self._can_end(config):
                    seen.add(config)
                    todo.append(config)
            self._count(len(more))
        if len(reading) > MAX_CONFIGS:
            raise refusal(
                f"the text so far has more than {MAX_CONFIGS} parses: make the grammar less ambiguous"
            )
        return self._numbered(may_end, reading)

    def _numbered(self, may_end: bool, reading: list[Config]) -> int:  # noqa: FBT001 - half of a key
        key = (may_end, frozenset(reading))
        state = self._state_ids.get(key)
        if state is None:
            state = self._state_ids[key] = len(self._may_end)
            if state >= self._most_states:
                raise refusal(f"it needs more than {self._most_states} states: make it simpler")
            self._readings.append(self._grouped(reading))
            self._may_end.append(may_end)
            if state >= len(self._table):
                more = np.full_like(self._table, _UNKNOWN)
                self._table = np.concatenate((self._table, more))
        return state

    def _grouped(self, reading: list[Config]) -> list[tuple[int, list[Config]]]:
        graph = self._graph
        groups: dict[int, list[Config]] = {}
        for node, frame in reading:
            groups.setdefault(graph.payloads[node], []).append((graph.followings[node], frame))
        return list(groups.items())

    def _can_end(self, config: Config) -> bool:
        node, frame = config
        return self._depths[frame] + self._recursion.needs[node] <= self._most_recursion

    def _frame(self, call: int, below: int) -> int:
        following, nests = self._graph.followings[call], self._recursion.nests[call]
        key = (following, below, nests)
        frame = self._frame_ids.get(key)
        if frame is None:
            frame = self._frame_ids[key] = len(self._frames)
            if frame >= MAX_STATES:
                raise refusal(f"it needs more than {MAX_STATES} stack frames: make it simpler")
            self._frames.append((following, below))
            self._depths.append(self._depths[below] + nests)
        return frame

    def _count(self, num_steps: int) -> None:
        self.work += num_steps
        if self.work > self.most_work:
            raise refusal("it exceeds the work limit: make it simpler, or less ambiguous")


def _byte_classes(sets: list[int]) -> tuple[NDArray[np.int64], list[int]]:
    """Classes of bytes that no set distinguishes.

    Returns:
        The class of each byte, int64 (256,), and for each class an integer whose bit `i` tells whether it is
        in set `i`.
    """
    classes: dict[int, int] = {}
    class_of_byte = np.zeros(256, np.int64)
    table = np.zeros((256, max(1, len(sets))), np.uint8)
    for number, members in enumerate(sets):
        table[:, number] = np.unpackbits(
            np.frombuffer(members.to_bytes(32, "little"), np.uint8), bitorder="little"
        )
    for byte, row in enumerate(np.packbits(table, axis=1, bitorder="little")):
        signature = int.from_bytes(row.tobytes(), "little")
        class_of_byte[byte] = classes.setdefault(signature, len(classes))
    return class_of_byte, list(classes)
