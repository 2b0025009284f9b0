"""What a proposer answers: tokens, how sure it is of each, and who it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Proposal:
    """A guess at what comes next.

    Attributes:
        tokens: Ids, in order; none where the proposer knows no better.
        confidences: One for each token, in [0, 1]: the proposer's own estimate that it is the target's, given
            that those before it were.
        proposer: Name of the proposer, such as `ngram`.
    """

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    proposer: str

    def first(self, count: int) -> Proposal:
        """At most `count` tokens of it."""
        if count >= len(self.tokens):
            return self
        count = max(count, 0)
        return Proposal(self.tokens[:count], self.confidences[:count], self.proposer)


EMPTY: Final = Proposal((), (), "")
