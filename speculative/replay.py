"""The replay proposer, for benchmarks: a recorded answer, token by token. The ceiling of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculative.proposal import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ReplayProposer:
    """Proposes one answer, for as long as it is the one that is given; see `speculative.proposer.Proposer`.

    Args:
        answer: Token ids that followed the prompt when it was asked before.
    """

    name = "replay"

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = tuple(answer)
        self._num_followed = -1
        self._is_astray = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Follow the answer; the first tokens are the prompt, which says nothing."""
        if self._num_followed < 0:
            self._num_followed = 0
            return
        stop = self._num_followed + len(tokens)
        self._is_astray |= self._answer[self._num_followed : stop] != tuple(tokens)
        self._num_followed = stop

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """What followed then; nothing once another answer is given."""
        start = self._num_followed + len(after)
        tokens = self._answer[start : start + max(max_tokens, 0)]
        if self._is_astray or not tokens:
            return EMPTY
        return Proposal(tokens, (1.0,) * len(tokens), self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """It answers at once."""

    def close(self) -> None:
        """There is nothing to let go of."""
