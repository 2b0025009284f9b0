"""The prediction proposer: what the client said the answer would be (OpenAI's predicted outputs)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from speculative.follower import Follower, Place
from speculative.gram_index import GramIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from speculative.proposal import Proposal

# A client that goes to the trouble means it: a handful of tokens at first, all of it once it proves right.
_TRUST: Final = Place(source=0, evidence=8, anchor=0)


class PredictionProposer:
    """Proposes from a text that the answer is expected to follow; see `speculative.proposer.Proposer`.

    Where the answer departs from it, the proposer looks for the place where it returns.

    Args:
        prediction: The expected answer, at least one token.
        tokens_per_evidence: How much is proposed for each unit of evidence (`speculative.evidence`).
    """

    name = "prediction"

    def __init__(self, prediction: Sequence[int], tokens_per_evidence: float = 4.0) -> None:
        index = GramIndex(2 * len(prediction) + 2)
        index.extend(prediction)
        self._follower = Follower(index, is_own_text=False, tokens_per_evidence=tokens_per_evidence)
        self._has_begun = False

    def extend(self, tokens: Sequence[int]) -> None:
        """The prompt, then committed tokens, which are looked up in the prediction."""
        if self._has_begun:
            self._follower.advance(tokens)
        elif tokens:
            self._follower.start((), _TRUST)
            self._has_begun = True

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """How the prediction goes on from where the committed tokens and `after` stand in it."""
        return self._follower.foretell(max_tokens, after, self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """It answers at once."""

    def close(self) -> None:
        """There is nothing to let go of."""
