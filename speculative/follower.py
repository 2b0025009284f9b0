"""Reading along in a known text: where a sequence stands in it, and how it goes on from there.

While the sequence says what the known text says, following costs one comparison. Where it departs, the place
is kept as an *anchor*: edited text returns to the original a little behind the place where it left it, so one
token found there says more than two found anywhere. Everything else is found by the longest match.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from speculative.evidence import MATCHED, NEARBY, PER_TOKEN, EvidenceTable
from speculative.gram_index import MAX_ORDER
from speculative.proposal import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculative.gram_index import GramIndex

# How far behind the anchor a lone token is looked for, and after how much other text the anchor is given up.
_REACH: Final = 64
_MAX_ASTRAY: Final = 4096
# A continuation that held for this many tokens, or that began this close to the anchor, moves the anchor.
_SETTLED: Final = 8
_CLOSE: Final = 16
# Prompts end alike because a chat template ends them: at most so much evidence that answers begin alike.
_AT_START: Final = 4


class Place(NamedTuple):
    """Where a sequence stands in the known text.

    Attributes:
        source: Position of the token that should come next, or None if nothing is known.
        evidence: How much speaks for it (`speculative.evidence`).
        num_followed: Tokens that came as foretold since the place was found.
        anchor: Position where the text was left, or None.
        num_astray: Tokens since then.
    """

    source: int | None = None
    evidence: int = 0
    num_followed: int = 0
    anchor: int | None = None
    num_astray: int = 0


class Follower:
    """Follows one sequence through an index.

    Args:
        index: The known text.
        is_own_text: Whether the index holds the sequence itself and grows with it: then a continuation may
            run into the end and repeat what it says itself.
        tokens_per_evidence: How much is foretold for each unit of evidence.
        table: Learns how likely texts like this go on; None for one of its own.
    """

    def __init__(
        self,
        index: GramIndex,
        *,
        is_own_text: bool,
        tokens_per_evidence: float,
        table: EvidenceTable | None = None,
    ) -> None:
        self._index = index
        self._is_own_text = is_own_text
        self._tokens_per_evidence = tokens_per_evidence
        self._table = table or EvidenceTable()
        self._place = Place()
        self._tail: list[int] = []

    def start(self, tokens: Sequence[int], place: Place | None = None) -> None:
        """Take note of what goes before, without learning from it.

        Args:
            tokens: The end of it is enough.
            place: Where the sequence stands after them; None to look for it.
        """
        self._tail = list(tokens[-MAX_ORDER:])
        if place is None:
            place = self._find(self._tail, None, 0)
            place = place._replace(evidence=min(place.evidence, _AT_START))
        self._place = place

    def advance(self, tokens: Sequence[int]) -> int:
        """Follow committed tokens, and learn from how well they were foretold.

        Returns:
            How many of the first were copied from the younger half of the index.
        """
        place = self._place
        foretold = self._foretold(place, len(tokens), ())
        num_right = _num_equal(foretold, tokens)
        if foretold:
            self._table.learn(place.evidence, num_right, is_missed=num_right < len(foretold))
        self._tail = [*self._tail, *tokens][-MAX_ORDER:]
        self._place = self._moved(place, num_right, len(tokens), self._tail)
        is_young = place.source is not None and place.source >= self._index.young_first
        return num_right if is_young else 0

    def foretell(self, max_tokens: int, ahead: Sequence[int], name: str) -> Proposal:
        """What follows the committed tokens and then `ahead`.

        Args:
            max_tokens: At most so many.
            ahead: Tokens in flight.
            name: The proposer's.
        """
        if max_tokens <= 0:
            return EMPTY
        place = self._place
        if ahead:
            num_right = _num_equal(self._foretold(place, len(ahead), ()), ahead)
            place = self._moved(place, num_right, len(ahead), [*self._tail, *ahead[-MAX_ORDER:]][-MAX_ORDER:])
        width = min(max_tokens, int(place.evidence * self._tokens_per_evidence))
        tokens = self._foretold(place, width, ahead)
        if not tokens:
            return EMPTY
        return Proposal(tuple(tokens), self._table.chances(place.evidence, len(tokens)), name)

    def _foretold(self, place: Place, count: int, ahead: Sequence[int]) -> list[int]:
        """The next `count` tokens from a place, or fewer if the text ends before."""
        index, source = self._index, place.source
        if source is None or source < index.first or count <= 0:
            return []
        tokens = index.read(source, source + count)
        if len(tokens) < count and self._is_own_text:
            # A text that repeats itself right now runs out of known tokens; what it is about to say goes on.
            tokens += ahead[max(0, source - index.stop) :]
            tokens = list(islice(cycle(tokens), count)) if tokens else tokens
        return tokens

    def _moved(self, place: Place, num_right: int, num_tokens: int, tail: list[int]) -> Place:
        """The place after `num_tokens` more, the first `num_right` of which were foretold."""
        source, evidence, num_followed, anchor, num_astray = place
        if source is None:
            return self._find(tail, anchor, num_astray + num_tokens)
        left = source + num_right
        num_followed += num_right
        if num_right == num_tokens:
            return Place(left, evidence + PER_TOKEN * num_right, num_followed, anchor, num_astray)
        if anchor is None or num_followed >= _SETTLED or 0 <= left - anchor <= _CLOSE:
            return self._find(tail, left, num_tokens - num_right)
        return self._find(tail, anchor, num_astray + num_followed + num_tokens - num_right)

    def _find(self, tail: list[int], anchor: int | None, num_astray: int) -> Place:
        """The likeliest place by what was said last: the longest match, or a shorter one near the anchor."""
        index = self._index
        source, evidence = None, 0
        match = index.find(tail)
        if match is not None:
            source, evidence = match.end, MATCHED[match.length]
        if anchor is not None and num_astray > _MAX_ASTRAY:
            anchor = None
        if anchor is not None and tail:
            near = index.find_near(tail[-1], anchor, min(anchor + _REACH, index.stop - 1))
            if near is not None:
                distance = near - anchor
                near_evidence = MATCHED[index.agreement(near + 1, tail)]
                near_evidence += NEARBY[distance] if distance < len(NEARBY) else 0
                if near_evidence > evidence:
                    source, evidence = near + 1, near_evidence
        return Place(source, evidence, 0, anchor, num_astray)


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    if len(left) == len(right) and left == list(right):
        return len(left)
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
