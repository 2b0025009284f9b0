"""Automaton over a grammar graph, built lazily, and the tokens of a vocabulary that it allows next.

A state is a set of configurations: each a node that reads a byte, and a stack of nodes to return to. States
and stacks are numbered when they first occur, and transitions are cached, as in a lazily built DFA. So a
number always means the same state: a rollback uses an older number, and nothing has to be copied or undone
for a rejected token.

Bytes that no rule distinguishes form a class, so a step is one lookup in a table of states and classes.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import ProtocolError
from stages.grammar.gbnf_parser import (
    MAX_CONFIGS,
    MAX_DRAW_WORK,
    MAX_RECURSION,
    MAX_STATES,
    MAX_TABLE_CELLS,
    NOT_UTF8,
    Token,
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
_MOST_MASKS: Final = 64
# Stage files have no vocabulary. So the coordinator sends it once in a ring, before the first session with a
# grammar.
_MAX_TEXT_BYTES: Final = 64 * 1024 * 1024
_QUICKEST: Final = 1
# No text has this byte, and no code begins with it.
_NEVER_READ: Final = b"\xfe"


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


class TokenMasks:
    """Masks of a grammar and a vocabulary, cached. For one thread at a time.

    Args:
        automaton: Automaton of the grammar.
        tree: Tree of the vocabulary.
    """

    def __init__(self, automaton: Automaton, tree: TokenTree) -> None:
        self.automaton = automaton
        self._tree = tree
        self._pieces = tree.pieces
        self._end_tokens = tree.texts.end_tokens
        self._masks: OrderedDict[int, NDArray[np.bool_]] = OrderedDict()

    def after(self, state: int, token: int) -> int:
        """The state after a token; `DEAD` if it may not come there."""
        if token in self._end_tokens:
            return state if self.automaton.may_end(state) else DEAD
        return self.automaton.after(state, self._pieces[token])

    def allows(self, state: int, token: int) -> bool:
        """Whether a token may come in a state."""
        return self.after(state, token) != DEAD

    def mask(self, state: int) -> NDArray[np.bool_]:
        """All tokens that may come: bool, shape (n_vocab,), read-only.

        The whole vocabulary is walked byte by byte, shared prefixes once: 2 to 4 ms for SmolLM2's.
        """
        mask = self._masks.get(state)
        if mask is None:
            mask = self._masks[state] = self._made(state)
            if len(self._masks) > _MOST_MASKS:
                self._masks.popitem(last=False)
        self._masks.move_to_end(state)
        return mask

    def _made(self, state: int) -> NDArray[np.bool_]:
        mask = np.zeros(len(self._pieces), bool)
        automaton = self.automaton
        if automaton.may_end(state):
            mask[self._tree.end_tokens] = True
        states = np.array([state], np.int32)
        for level in self._tree.levels:
            states = automaton.after_each(states[level.parents], automaton.class_of_byte[level.bytes])
            if states.max() == DEAD:
                break
            mask[level.tokens] = states[level.token_nodes] != DEAD
        return mask


@dataclass(frozen=True)
class TokenTexts:
    """Bytes of every token of a vocabulary."""

    pieces: tuple[bytes, ...]
    """Bytes of each token id; empty for control tokens."""
    end_tokens: frozenset[int]
    """The ids that end an answer."""

    @cached_property
    def message(self) -> wire.Vocabulary:
        """Wire form. SmolLM2's takes 20 ms to make, the first time."""
        return wire.Vocabulary(
            texts=zlib.compress(b"".join(self.pieces), _QUICKEST),
            lengths=[len(piece) for piece in self.pieces],
            end_tokens=sorted(self.end_tokens),
        )

    @classmethod
    def from_wire(cls, message: wire.Vocabulary, n_vocab: int) -> TokenTexts:
        """The texts from a message.

        Args:
            message: Message of the coordinator.
            n_vocab: Number of token ids.

        Raises:
            ProtocolError: If it is another vocabulary's, or inconsistent.
        """
        if len(message.lengths) != n_vocab:
            raise ProtocolError(
                f"the vocabulary has {len(message.lengths)} tokens, but the model has {n_vocab}"
            )
        num_bytes = sum(message.lengths)
        if num_bytes > _MAX_TEXT_BYTES:
            raise ProtocolError(
                f"the vocabulary has {num_bytes} bytes: at most {_MAX_TEXT_BYTES} are accepted"
            )
        unpacker = zlib.decompressobj()
        try:
            texts = unpacker.decompress(message.texts, num_bytes + 1)
        except zlib.error as error:
            raise ProtocolError(f"the vocabulary cannot be decompressed: {error}") from None
        if len(texts) != num_bytes:
            raise ProtocolError(f"the vocabulary's texts do not have the {num_bytes} bytes of its lengths")
        if any(token >= n_vocab for token in message.end_tokens):
            raise ProtocolError(f"the vocabulary names an end token beyond its {n_vocab} tokens")
        bounds = pairwise(accumulate(message.lengths, initial=0))
        return cls(tuple(texts[start:stop] for start, stop in bounds), frozenset(message.end_tokens))


@dataclass(frozen=True)
class Level:
    """Prefixes of one length: nodes, sorted by parent, then by byte."""

    parents: NDArray[np.int64]
    """int64, shape (n,): parent of each node in the level before; 0 at the first level."""
    bytes: NDArray[np.uint8]
    """uint8, shape (n,): the last byte of each."""
    tokens: NDArray[np.int64]
    """int64, shape (m,): ids of the tokens that end at this level."""
    token_nodes: NDArray[np.int64]
    """int64, shape (m,): the node where each of them does."""


@dataclass(frozen=True)
class TokenTree:
    """Prefix tree of a vocabulary. SmolLM2's takes 0.1 s to make and 3 MB."""

    texts: TokenTexts
    """The vocabulary by token."""
    pieces: tuple[bytes, ...]
    """Bytes of each token id; the codes of grammars for tokens without text."""
    levels: tuple[Level, ...]
    """Prefixes of 1, 2, … bytes."""
    end_tokens: NDArray[np.int64]
    """int64: the ids that end an answer; no level has them."""

    @classmethod
    def of(cls, texts: TokenTexts) -> TokenTree:
        """The tree of a vocabulary; without tokens that end an answer."""
        pieces = tuple(_readable(token, piece) for token, piece in enumerate(texts.pieces))
        ids = sorted(
            (token for token in range(len(pieces)) if token not in texts.end_tokens), key=pieces.__getitem__
        )
        flat = np.frombuffer(b"".join(pieces[token] for token in ids), np.uint8)
        lengths = np.array([len(pieces[token]) for token in ids], np.int64)
        starts = np.cumsum(lengths) - lengths
        tokens = np.array(ids, np.int64)
        parents = np.zeros(len(ids), np.int64)
        levels: list[Level] = []
        while tokens.size:
            values = flat[starts + len(levels)]
            is_new = np.ones(tokens.size, bool)
            is_new[1:] = (values[1:] != values[:-1]) | (parents[1:] != parents[:-1])
            nodes = np.cumsum(is_new) - 1
            ends = lengths == len(levels) + 1
            levels.append(Level(parents[is_new], values[is_new], tokens[ends], nodes[ends]))
            tokens, starts, lengths, parents = (each[~ends] for each in (tokens, starts, lengths, nodes))
        return cls(texts, pieces, tuple(levels), np.array(sorted(texts.end_tokens), np.int64))


def _readable(token: int, piece: bytes) -> bytes:
    """A token's bytes for grammars: its code if it has no text."""
    if NOT_UTF8 in piece:
        # Of no text, and not to be taken for the beginning of a code.
        return _NEVER_READ
    return piece or Token(token).code


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
