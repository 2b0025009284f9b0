"""Which tokens may follow a text under a grammar."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from stages.grammar.automaton import DEAD, Automaton

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.grammar.token_tree import TokenTree

_MOST_MASKS: Final = 64


class TokenMasks:
    """A grammar and a vocabulary brought together. For one thread at a time.

    Args:
        automaton: The grammar's.
        tree: The vocabulary's.
    """

    def __init__(self, automaton: Automaton, tree: TokenTree) -> None:
        self.automaton = automaton
        self._tree = tree
        self._pieces = tree.texts.pieces
        self._end_tokens = tree.texts.end_tokens
        self._masks: OrderedDict[int, NDArray[np.bool_]] = OrderedDict()

    def after(self, state: int, token: int) -> int:
        """The state behind a token; `DEAD` if it may not come there."""
        if token in self._end_tokens:
            return state if self.automaton.may_end(state) else DEAD
        piece = self._pieces[token]
        return self.automaton.after(state, piece) if piece else DEAD

    def allows(self, state: int, token: int) -> bool:
        """Whether a token may come in that state."""
        return self.after(state, token) != DEAD

    def mask(self, state: int) -> NDArray[np.bool_]:
        """All tokens that may: bool, shape (n_vocab,); not to be changed.

        The whole vocabulary is read byte by byte, each beginning once: 2 to 4 ms for SmolLM2's.
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
