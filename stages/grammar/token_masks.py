"""Token masks: tokens of a vocabulary that a grammar allows next."""

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
from stages.grammar.automaton import DEAD, Automaton

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_MASKS: Final = 64
# Stage files have no vocabulary. So the coordinator sends it once in a ring, before the first session with a
# grammar.
_MAX_TEXT_BYTES: Final = 64 * 1024 * 1024
_QUICKEST: Final = 1


class TokenMasks:
    """Masks of a grammar and a vocabulary, cached. For one thread at a time.

    Args:
        automaton: Automaton of the grammar.
        tree: Tree of the vocabulary.
    """

    def __init__(self, automaton: Automaton, tree: TokenTree) -> None:
        self.automaton = automaton
        self._tree = tree
        self._pieces = tree.texts.pieces
        self._end_tokens = tree.texts.end_tokens
        self._masks: OrderedDict[int, NDArray[np.bool_]] = OrderedDict()

    def after(self, state: int, token: int) -> int:
        """The state after a token; `DEAD` if it may not come there."""
        if token in self._end_tokens:
            return state if self.automaton.may_end(state) else DEAD
        piece = self._pieces[token]
        return self.automaton.after(state, piece) if piece else DEAD

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
    levels: tuple[Level, ...]
    """Prefixes of 1, 2, … bytes."""
    end_tokens: NDArray[np.int64]
    """int64: the ids that end an answer; no level has them."""

    @classmethod
    def of(cls, texts: TokenTexts) -> TokenTree:
        """The tree of a vocabulary; without tokens that have no text or end it."""
        pieces = texts.pieces
        ids = sorted(
            (token for token, piece in enumerate(pieces) if piece and token not in texts.end_tokens),
            key=pieces.__getitem__,
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
        return cls(texts, tuple(levels), np.array(sorted(texts.end_tokens), np.int64))
