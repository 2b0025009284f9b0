"""Session grammar: state of one answer by position, and the grammars that sessions of a tail share.

Like the KV cache it is truncated at the start of each window: the state after a token is a number that
depends only on the answer up to it, so rejected tokens leave no trace.

A window that was sent before its predecessor was rejected is void, but may be computed all the same. Its
tokens were not sampled, and so need not match the grammar: there is no state after them, and the coordinator
discards the samples.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import InvalidWindow, ProtocolError
from stages.grammar.automaton import DEAD, Automaton, TokenMasks, TokenTexts, TokenTree
from stages.grammar.gbnf_parser import MAX_ANSWER_WORK, MAX_DRAW_WORK, parse_gbnf, refusal
from stages.grammar.graph import build_graph, refuse_left_recursion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from spanmesh_proto import windows_pb2 as wire

_MAX_CACHED: Final = 16


class Constraint:
    """Tokens that may come at one position of an answer.

    Args:
        masks: Masks of grammar and vocabulary.
        state: State of the answer before the position.
        position: Absolute, for messages.
    """

    def __init__(self, masks: TokenMasks, state: int, position: int) -> None:
        self._masks = masks
        self._state = state
        self._position = position

    def allows(self, token: int) -> bool:
        """Whether a token may come."""
        return self._masks.allows(self._state, token)

    def restrict(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The row with minus infinity for tokens that may not come.

        Args:
            logits: float32, shape (n_vocab,); not changed.

        Raises:
            InvalidRequest: If no token may come, or the grammar takes too much work.
        """
        mask = self._masks.mask(self._state)
        restricted = np.where(mask, logits, np.float32(-np.inf))
        if not np.isfinite(restricted.max()):
            raise refusal(
                f"it allows no token of this model at position {self._position}: let it end there, or allow"
                " other text"
            )
        return restricted


class GrammarRecord:
    """Grammar states of one session's answer.

    Args:
        open_masks: Returns the masks of grammar and vocabulary; called at the first use.
        num_prompt: Number of the session's first tokens that are the prompt, which the grammar ignores.
    """

    def __init__(self, open_masks: Callable[[], TokenMasks], num_prompt: int) -> None:
        self._open_masks = open_masks
        self._masks: TokenMasks | None = None
        self._num_prompt = num_prompt
        self._answer: list[int] = []
        # State before token `i` of the answer, as far as computed.
        self._states: list[int] = []
        # Samples of the latest window, by index in the answer.
        self._drawn: dict[int, int] = {}
        self._void_from: int | None = None
        self._work = self._work_before = 0
        # Apart from the answer's, which drafts must not use up.
        self._foretold_work = 0

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Replace all tokens from absolute position `start` on.

        Raises:
            InvalidWindow: If that would leave a gap in the answer.
        """
        place = max(0, start - self._num_prompt)
        if place > len(self._answer):
            raise InvalidWindow(
                f"a window starts at position {start}, beyond the end of the grammar's record"
            )
        del self._answer[place:]
        del self._states[place + 1 :]
        self._answer.extend(tokens[max(0, self._num_prompt - start) :])
        if self._void_from is not None and self._void_from >= place:
            self._void_from = None
        drawn = self._drawn.get(place)
        self._drawn = {} if drawn is None else {place: drawn}
        if drawn is not None and place < len(self._answer) and self._answer[place] != drawn:
            self._note_void(place)

    def constraint(self, position: int, *, is_foretold: bool = False) -> Constraint | None:
        """Constraint of an absolute position; None where a sample does not count.

        Args:
            position: The position.
            is_foretold: Whether a draft is drawn there, and not the answer's own token.

        Raises:
            InvalidRequest: If the grammar is invalid, or takes too much work.
        """
        if self._masks is not None:
            # Other sessions may share them.
            self._work_before = self._masks.automaton.work
        place = position - self._num_prompt
        if place < 0 or (self._void_from is not None and place > self._void_from):
            return None
        masks = self._masks = self._masks or self._open_masks()
        automaton = masks.automaton
        if not self._states:
            self._states.append(automaton.start)
        self._work_before = automaton.work
        # Work of earlier tokens of a replayed answer counts as well.
        num_steps = max(1, place + 1 - len(self._states))
        work = self._foretold_work if is_foretold else self._work
        automaton.most_work = automaton.work + min(num_steps * MAX_DRAW_WORK, MAX_ANSWER_WORK - work)
        while len(self._states) <= place:
            self._states.append(masks.after(self._states[-1], self._answer[len(self._states) - 1]))
        if self._states[place] == DEAD:
            # Sampled tokens always match the grammar, so this window is void.
            return None
        return Constraint(masks, self._states[place], position)

    def note_foretold(self) -> None:
        """Record that a draft was drawn, or could not be, under the latest constraint."""
        self._foretold_work += self._take_work()

    def note_drawn(self, position: int, token: int) -> None:
        """Record the sample of an absolute position of the answer."""
        self._work += self._take_work()
        place = position - self._num_prompt
        if place < 0:
            return
        self._drawn[place] = token
        if place < len(self._answer) and self._answer[place] != token:
            self._note_void(place)

    def _take_work(self) -> int:
        """Work since the latest constraint, or since this was last asked."""
        if self._masks is None:
            return 0
        before, self._work_before = self._work_before, self._masks.automaton.work
        return self._work_before - before

    def _note_void(self, place: int) -> None:
        if self._void_from is None or place < self._void_from:
            self._void_from = place


class Grammars:
    """Grammars of one tail. `take` is for the event loop, the rest for the computing thread.

    Args:
        n_vocab: Number of token ids.
    """

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._message: wire.Vocabulary | None = None
        self._tree: TokenTree | None = None
        self._vocabulary: wire.Vocabulary | None = None
        self._cache: OrderedDict[tuple[bytes, str], TokenMasks] = OrderedDict()

    def take(self, message: wire.Vocabulary) -> None:
        """Store the vocabulary from the coordinator."""
        self._message = message

    def masks(self, text: str, client: bytes = b"") -> TokenMasks:
        """Masks of a grammar and the latest vocabulary.

        They are kept for sessions of the same client only: the time to the first token shows what is kept.

        Args:
            text: The grammar, GBNF.
            client: See `SessionSpec`.

        Raises:
            InvalidRequest: If the grammar is invalid.
            ProtocolError: If there is no vocabulary, or it is not this model's.
        """
        tree = self._read()
        key = client, text
        masks = self._cache.get(key)
        if masks is None or masks.automaton.is_half_full:
            masks = self._cache[key] = TokenMasks(make_automaton(text), tree)
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return masks

    def _read(self) -> TokenTree:
        message = self._message
        if message is None:
            raise ProtocolError("a session has a grammar, but no vocabulary was sent before it")
        if self._tree is None or message is not self._vocabulary:
            if self._tree is None or message != self._vocabulary:
                self._tree = TokenTree.of(TokenTexts.from_wire(message, self._n_vocab))
                self._cache.clear()
            self._vocabulary = message
        return self._tree


def make_automaton(text: str) -> Automaton:
    """Automaton of a GBNF text.

    Raises:
        InvalidRequest: If it is malformed, has no rule `root`, is left-recursive, or is too large.
    """
    graph = build_graph(parse_gbnf(text))
    refuse_left_recursion(graph)
    return Automaton(graph)
