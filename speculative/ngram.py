"""The n-gram proposer: what followed the last time the sequence said this.

Prompt lookup (Saxena 2023) with the longest possible n-gram, and with a memory of where it is: the session's
own text is followed as a reader's finger follows the line (`speculative.follower`). The more speaks for a
place, the more is proposed: chance repeats are short, quotations and rewrites are long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from speculative.follower import Follower
from speculative.gram_index import GramIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from speculative.proposal import Proposal


@dataclass(frozen=True)
class NgramOptions:
    """How bold the proposer is, and how much it remembers.

    Attributes:
        tokens_per_evidence: Tokens proposed for each unit of evidence (`speculative.evidence`): a match of
            two tokens anywhere is worth 4, one of four tokens 6, each token that came as foretold 2 more.
        max_indexed_tokens: Beyond this many, the older half is forgotten. Each takes about 0.5 KB.

    Raises:
        ValueError: If a value is not positive.
    """

    tokens_per_evidence: float = 0.85
    max_indexed_tokens: int = 32768

    def __post_init__(self) -> None:
        if self.tokens_per_evidence <= 0.0 or self.max_indexed_tokens < 2:
            raise ValueError(f"{self}: tokens_per_evidence must be positive, max_indexed_tokens 2 or more")


class NgramProposer:
    """Proposes from one session's own text; see `speculative.proposer.Proposer`.

    Args:
        options: How bold it is, and how much it remembers.
    """

    name = "ngram"

    def __init__(self, options: NgramOptions | None = None) -> None:
        options = options or NgramOptions()
        self._index = GramIndex(options.max_indexed_tokens)
        self._follower = Follower(
            self._index, is_own_text=True, tokens_per_evidence=options.tokens_per_evidence
        )
        self._has_begun = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Index committed tokens: constant time each."""
        if self._has_begun:
            self._index.extend(tokens, self._follower.advance(tokens))
        elif tokens:
            # The prompt is one text from outside; whether it repeats itself says nothing about the answer.
            self._index.extend(tokens)
            self._follower.start(tokens)
            self._has_begun = True

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """How the known text goes on from where the committed tokens and `after` stand in it."""
        return self._follower.foretell(max_tokens, after, self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """It answers at once."""

    def close(self) -> None:
        """There is nothing to let go of."""
