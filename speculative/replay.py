"""The replay proposer, for benchmarks: it knows the answer. What it reaches is the ceiling of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculative.follower import Follower, Place
from speculative.gram_index import GramIndex
from speculative.proposal import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ReplayProposer:
    """Proposes a recorded answer; see `speculative.proposer.Proposer`.

    It is certain for as long as the answer is the recorded one. Without exact mode another shape of batch may
    let the model choose otherwise once; after that it looks for the place to go on.

    Args:
        answer: Token ids that followed the prompt when it was asked before; none if that was never.
    """

    name = "replay"

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = tuple(answer)
        index = GramIndex(2 * len(self._answer) + 2)
        index.extend(self._answer)
        self._follower = Follower(index, is_own_text=False, tokens_per_evidence=4.0)
        self._follower.start((), Place(source=0, evidence=128, anchor=0) if answer else None)
        self._has_begun = False
        self._num_committed = 0
        self._is_astray = not answer

    def extend(self, tokens: Sequence[int]) -> None:
        """The prompt, which says nothing, then committed tokens."""
        if not self._has_begun:
            self._has_begun = bool(tokens)
            return
        self._is_astray = self._is_astray or not self._says(tokens)
        self._num_committed += len(tokens)
        self._follower.advance(tokens)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """The recorded tokens from there on."""
        if self._is_astray or not self._says(after):
            return self._follower.foretell(max_tokens, after, self.name)
        start = self._num_committed + len(after)
        tokens = self._answer[start : start + max(max_tokens, 0)]
        return Proposal(tokens, (1.0,) * len(tokens), self.name) if tokens else EMPTY

    def listen(self, on_ready: Callable[[], None]) -> None:
        """It answers at once."""

    def close(self) -> None:
        """There is nothing to let go of."""

    def _says(self, tokens: Sequence[int]) -> bool:
        start = self._num_committed
        return self._answer[start : start + len(tokens)] == tuple(tokens)
