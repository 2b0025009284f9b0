"""Grammar state of one session by position, and the grammars that sessions of a tail share.

Like the KV cache it is cut where a window starts, and goes on with it: the state behind a token is a number
that depends on the answer up to it and on nothing else, so proposed tokens that are rejected leave no trace.

A window that was sent before its predecessor was rejected is void, but may be computed all the same. Its
tokens are not what was drawn, and so need not fit the grammar: no state is known behind them, and whatever is
drawn there is thrown away by the coordinator.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import InvalidWindow, ProtocolError
from stages.grammar.automaton import DEAD, Automaton
from stages.grammar.gbnf_parser import MAX_ANSWER_WORK, MAX_DRAW_WORK, parse_gbnf, refusal
from stages.grammar.graph import build_graph, refuse_left_recursion
from stages.grammar.token_masks import TokenMasks, TokenTexts, TokenTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from spanmesh_proto import windows_pb2 as wire


class Constraint:
    """What may come at one place of an answer.

    Args:
        masks: The grammar and the vocabulary.
        state: Where the answer has come to.
        position: Absolute, for messages.
    """

    def __init__(self, masks: TokenMasks, state: int, position: int) -> None:
        self._masks = masks
        self._state = state
        self._position = position

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        return self._masks.allows(self._state, token)

    def restrict(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The row with minus infinity for what may not.

        Args:
            logits: float32, shape (n_vocab,); it is not changed.

        Raises:
            InvalidRequest: If nothing may, or the grammar makes too much work.
        """
        mask = self._masks.mask(self._state)
        restricted = np.where(mask, logits, np.float32(-np.inf))
        if not np.isfinite(restricted.max()):
            raise refusal(
                f"no token of this model can go on at position {self._position}: let it end, or go on"
                " otherwise, there"
            )
        return restricted


class GrammarRecord:
    """The states of one session's answer.

    Args:
        open_masks: Gives the grammar and the vocabulary; asked when they are first needed.
        num_prompt: How many of the session's first tokens are the prompt, which the grammar does not concern.
    """

    def __init__(self, open_masks: Callable[[], TokenMasks], num_prompt: int) -> None:
        self._open_masks = open_masks
        self._masks: TokenMasks | None = None
        self._num_prompt = num_prompt
        self._answer: list[int] = []
        # The state before token `i` of the answer, as far as anybody asked.
        self._states: list[int] = []
        # What the latest window's rows gave, by place.
        self._drawn: dict[int, int] = {}
        self._void_from: int | None = None
        self._work = self._work_before = 0

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Forget everything from absolute position `start` on and put `tokens` there.

        Raises:
            InvalidWindow: If that would leave a gap in the answer.
        """
        place = max(0, start - self._num_prompt)
        if place > len(self._answer):
            raise InvalidWindow(f"a window starts at position {start}, but the grammar has not come so far")
        del self._answer[place:]
        del self._states[place + 1 :]
        self._answer.extend(tokens[max(0, self._num_prompt - start) :])
        if self._void_from is not None and self._void_from >= place:
            self._void_from = None
        drawn = self._drawn.get(place)
        self._drawn = {} if drawn is None else {place: drawn}
        if drawn is not None and place < len(self._answer) and self._answer[place] != drawn:
            self._note_void(place)

    def constraint(self, position: int) -> Constraint | None:
        """What may come at an absolute position; None where that does not matter.

        Raises:
            InvalidRequest: If the grammar does not work, or makes too much work.
        """
        place = position - self._num_prompt
        if place < 0 or (self._void_from is not None and place > self._void_from):
            return None
        masks = self._masks = self._masks or self._open_masks()
        automaton = masks.automaton
        if not self._states:
            self._states.append(automaton.start)
        self._work_before = automaton.work
        # Those before it in a replayed answer are made up for at once.
        num_steps = max(1, place + 1 - len(self._states))
        automaton.most_work = automaton.work + min(num_steps * MAX_DRAW_WORK, MAX_ANSWER_WORK - self._work)
        while len(self._states) <= place:
            self._states.append(masks.after(self._states[-1], self._answer[len(self._states) - 1]))
        if self._states[place] == DEAD:
            # What was drawn always keeps to it: this window is void, for a reason that is not known here.
            return None
        return Constraint(masks, self._states[place], position)

    def note_drawn(self, position: int, token: int) -> None:
        """What was drawn for an absolute position, with what `constraint` gave; not for the prompt's."""
        if self._masks is not None:
            self._work += self._masks.automaton.work - self._work_before
            self._work_before = self._masks.automaton.work
        place = position - self._num_prompt
        if place < 0:
            return
        self._drawn[place] = token
        if place < len(self._answer) and self._answer[place] != token:
            self._note_void(place)

    def _note_void(self, place: int) -> None:
        if self._void_from is None or place < self._void_from:
            self._void_from = place


_MAX_CACHED: Final = 16


def make_automaton(text: str) -> Automaton:
    """A GBNF text, ready to run.

    Raises:
        InvalidRequest: If it is no grammar, has no rule `root`, is left-recursive, or is too large.
    """
    graph = build_graph(parse_gbnf(text))
    refuse_left_recursion(graph)
    return Automaton(graph)


class Grammars:
    """Those of one tail. `take` is for its event loop, all else for the thread that computes.

    Args:
        n_vocab: Token ids are below this.
    """

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._message: wire.Vocabulary | None = None
        self._tree: TokenTree | None = None
        self._vocabulary: wire.Vocabulary | None = None
        self._cache: OrderedDict[str, TokenMasks] = OrderedDict()

    def take(self, message: wire.Vocabulary) -> None:
        """The vocabulary, as the coordinator tells it."""
        self._message = message

    def masks(self, text: str) -> TokenMasks:
        """The grammar, and the vocabulary that was told last.

        Raises:
            InvalidRequest: If it is no grammar that works.
            ProtocolError: If there is no vocabulary, or it is not this model's.
        """
        tree = self._read()
        masks = self._cache.get(text)
        if masks is None or masks.automaton.is_half_full:
            masks = self._cache[text] = TokenMasks(make_automaton(text), tree)
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(text)
        return masks

    def _read(self) -> TokenTree:
        message = self._message
        if message is None:
            raise ProtocolError("a session has a grammar, but no vocabulary came before it")
        if self._tree is None or message is not self._vocabulary:
            if self._tree is None or message != self._vocabulary:
                self._tree = TokenTree.of(TokenTexts.from_wire(message, self._n_vocab))
                self._cache.clear()
            self._vocabulary = message
        return self._tree
