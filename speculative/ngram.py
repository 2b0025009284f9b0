"""The n-gram proposer: what followed the last time the sequence said this.

Prompt lookup (Saxena 2023) with the longest possible n-gram: a suffix automaton finds the longest suffix of
the session's own text that occurred before, and what came after its latest occurrence is proposed again.
The longer the match, the more of it: chance repeats are short, quotations and rewrites are long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from speculative.proposal import EMPTY, Proposal
from speculative.suffix_automaton import SuffixAutomaton

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class NgramOptions:
    """How bold the proposer is, and how much it remembers.

    Attributes:
        min_match: A suffix must match at least this many tokens.
        tokens_per_match: Tokens proposed for each matched token.
        max_indexed_tokens: Beyond this many, the older half is forgotten. Each takes about 0.5 KB.

    Raises:
        ValueError: If a value is not positive.
    """

    min_match: int = 2
    tokens_per_match: float = 1.0
    max_indexed_tokens: int = 16384

    def __post_init__(self) -> None:
        if self.min_match < 1 or self.tokens_per_match <= 0.0 or self.max_indexed_tokens < 2:
            raise ValueError(
                f"{self}: min_match and tokens_per_match must be positive, max_indexed_tokens 2 or more"
            )


class NgramProposer:
    """Proposes from one session's own text; see `speculative.proposer.Proposer`.

    Args:
        options: How bold it is, and how much it remembers.
    """

    name = "ngram"

    def __init__(self, options: NgramOptions | None = None) -> None:
        self._options = options or NgramOptions()
        self._index = SuffixAutomaton()

    def extend(self, tokens: Sequence[int]) -> None:
        """Index committed tokens: amortised constant time each."""
        room = self._options.max_indexed_tokens - len(self._index.tokens)
        if len(tokens) > room:
            kept = [*self._index.tokens, *tokens][-(self._options.max_indexed_tokens // 2) :]
            self._index = SuffixAutomaton()
            tokens = kept
        for token in tokens:
            self._index.append(token)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """What followed the latest occurrence of the longest suffix of the committed tokens and `after`."""
        match = self._index.repeated
        for token in after:
            match = self._index.advance(match, token)
        if match.length < self._options.min_match:
            return EMPTY
        width = min(max_tokens, int(match.length * self._options.tokens_per_match))
        if width <= 0:
            return EMPTY
        # A text that repeats itself right now runs out of known tokens; what it is about to say goes on.
        known, ahead = self._index.tokens, list(after)
        begin = self._index.end(match)
        for source in range(begin, begin + width):
            ahead.append(known[source] if source < len(known) else ahead[source - len(known)])
        # The longer the match has become, the likelier it goes on: each right guess is a longer match.
        confidences = tuple(1.0 - 1.0 / (1.0 + match.length + place) for place in range(width))
        return Proposal(tuple(ahead[len(after) :]), confidences, self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """It answers at once."""

    def close(self) -> None:
        """There is nothing to let go of."""
