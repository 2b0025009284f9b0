"""N-gram index: hash index of a growing text, cursor, and confidence by evidence.

For a few lengths the index keeps the latest position of every n-gram. The longest match of a context is found
by trying the lengths upwards and comparing backwards from there. Tokens are entered in bulk by `dict.update`,
which costs a fraction of a suffix automaton in Python, and text that was copied from elsewhere in the index
is not entered again. Old text is dropped one generation at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import cycle, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from speculative.proposer import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDERS: Final = (2, 4, 8)
# Longest context that is compared.
MAX_ORDER: Final = 16
_STEPS_BACK: Final = (8, 4, 2, 1, 1)
# So few n-grams are entered one by one, which is quicker than in bulk.
_FEW: Final = 4
# Evidence is a small integer: its start depends on the match (`MATCHED`, `NEARBY`), and each correctly
# predicted token adds two. Starting values and probabilities were fitted to rewritten files of five Python
# packages (not those of the benchmark); a session's own hits and misses correct the probabilities.
PER_TOKEN: Final = 2
# Evidence of a match of this many tokens; a match of one says next to nothing.
MATCHED: Final = (0, 2, 4, 5, 6, 6, 7, 7, 7, 7, 8, 8, 9, 9, 10, 10, 14)
# Added for a match 0, 1, … tokens behind the anchor.
NEARBY: Final = (4, *[2] * 3, *[1] * 12)
# From each of these amounts of evidence on, the probability that the next token is predicted correctly.
_STEPS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 16, 24, 40, 64, 128)
_CHANCES: Final = (0.10, 0.19, 0.33, 0.46, 0.58, 0.67, 0.78, 0.86, 0.93, 0.96, 0.98, 0.991, 0.998)
_LAST: Final = len(_STEPS) - 1
# Step of each amount of evidence, up to the start of the last one.
_STEP_OF: Final = tuple(max(bisect_right(_STEPS, evidence) - 1, 0) for evidence in range(_STEPS[-1]))
# Distance behind the anchor up to which a single token is searched, and number of other tokens after which
# the anchor is dropped.
_REACH: Final = 64
_MAX_DIVERGED: Final = 4096
# A continuation that held for this many tokens, or that began this close to the anchor, moves the anchor.
_SETTLED: Final = 8
_CLOSE: Final = 16
# Prompts end alike because of the chat template: most evidence at the beginning of an answer.
_AT_START: Final = 4


class Occurrence(NamedTuple):
    """Match of a context."""

    end: int
    """Position of the token after it."""
    length: int
    """Number of matching tokens, at most `MAX_ORDER`."""


class NgramIndex:
    """Tokens of a text by position, and the latest end of each n-gram.

    Positions count from the text's first token and do not change when old text is dropped.

    Args:
        max_tokens: Size of the kept text: at least half of this, at most all of it.

    Attributes:
        first: Position of the first token that is kept.
        young_first: Position of the first token to be kept when old text is dropped next.

    Raises:
        ValueError: If `max_tokens` is below 2.
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 2:
            raise ValueError(f"max_tokens is {max_tokens}: an index keeps at least 2 tokens")
        self.first = 0
        self.young_first = 0
        self._generation = max_tokens // 2
        self._tokens: list[int] = []
        self._young: tuple[dict[int, int], ...] = tuple({} for _ in ORDERS)
        self._old: tuple[dict[int, int], ...] = tuple({} for _ in ORDERS)
        # Start of the original of the copied text at the index's end; None if it does not end with any.
        self._copied_from: int | None = None

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.first + len(self._tokens)

    def read(self, start: int, stop: int) -> list[int]:
        """Tokens at positions `[start, stop)`; `start` is not before `first`."""
        return self._tokens[start - self.first : stop - self.first]

    def extend(self, tokens: Sequence[int], num_copied: int = 0) -> None:
        """Append text.

        Args:
            tokens: Token ids.
            num_copied: Number of first tokens that are copied from the younger half of the index: they need
                not be found here as well.
        """
        begin = 0
        while begin < len(tokens):
            room = self.young_first + self._generation - self.stop
            part = tokens[begin : begin + room]
            self._append(part, min(max(num_copied - begin, 0), len(part)))
            begin += len(part)
            if len(part) == room:
                self._forget()

    def find(self, context: list[int]) -> Occurrence | None:
        """Latest occurrence of the longest n-gram at the end of `context`, of at least two tokens."""
        found = None
        for order, young, old in zip(ORDERS, self._young, self._old, strict=True):
            key = hash(tuple(context[-order:]))
            end = young.get(key)
            if end is None:
                end = old.get(key)
            if end is None:
                break
            found = end
        length = 0 if found is None else self.agreement(found, context)
        return Occurrence(found, length) if found is not None and length >= ORDERS[0] else None

    def find_near(self, token: int, start: int, stop: int) -> int | None:
        """Position of the first `token` in `[start, stop)`."""
        try:
            return self.first + self._tokens.index(
                token, max(start - self.first, 0), max(stop - self.first, 0)
            )
        except ValueError:
            return None

    def agreement(self, end: int, context: list[int]) -> int:
        """Number of tokens before position `end` that match the end of `context`, at most `MAX_ORDER`."""
        tokens, place = self._tokens, end - self.first
        length = 0
        # Halving steps: their sum is `MAX_ORDER`, and each is one comparison.
        for step in _STEPS_BACK:
            upto = place - length
            left = len(context) - length
            if step <= upto and step <= left and tokens[upto - step : upto] == context[left - step : left]:
                length += step
        return length

    def _append(self, tokens: Sequence[int], num_copied: int) -> None:
        start = self.first + len(self._tokens)
        self._tokens.extend(tokens)
        stop = start + len(tokens)
        num_new = start + num_copied
        if num_copied and self._copied_from is None:
            self._copied_from = start
        if self._copied_from is None:
            self._enter(start, stop)
            return
        # N-grams within a copy are known from its original.
        if start < self._copied_from + ORDERS[-1]:
            self._enter(start, num_new, self._copied_from)
        if num_new < stop:
            self._enter(num_new, stop)
            self._copied_from = None

    def _enter(self, start: int, stop: int, copied_from: int | None = None) -> None:
        """Enter the n-grams that end before the positions `[start, stop)`, except those within a copy."""
        tokens, first = self._tokens, self.first
        for order, young in zip(ORDERS, self._young, strict=True):
            begin = max(start - first, order)
            end = (stop if copied_from is None else min(stop, copied_from + order)) - first
            if end - begin > _FEW:
                grams = zip(*(tokens[begin - back : end - back] for back in range(order, 0, -1)), strict=True)
                young.update(zip(map(hash, grams), range(begin + first, end + first), strict=True))
            else:
                for place in range(begin, end):
                    young[hash(tuple(tokens[place - order : place]))] = place + first

    def _forget(self) -> None:
        """Drop the older generation; the younger one takes its place."""
        del self._tokens[: self.young_first - self.first]
        self.first = self.young_first
        self.young_first = self.stop
        self._old, self._young = self._young, tuple({} for _ in ORDERS)


class EvidenceTable:
    """Probability of a correct prediction by evidence, updated with hits and misses.

    Args:
        prior_weight: Number of observations that weigh as much as the fitted probability.
    """

    def __init__(self, prior_weight: float = 8.0) -> None:
        self._hits = [chance * prior_weight for chance in _CHANCES]
        self._trials = [prior_weight] * len(_STEPS)
        self._chances = list(_CHANCES)

    def chances(self, evidence: int, count: int) -> tuple[float, ...]:
        """Probability of each of the next `count` tokens, given that those before it are right."""
        chances = self._chances
        steps = _STEP_OF[evidence : evidence + PER_TOKEN * count : PER_TOKEN]
        return tuple([chances[step] for step in steps]) + (chances[_LAST],) * (count - len(steps))

    def learn(self, evidence: int, num_right: int, *, is_missed: bool) -> None:
        """Record the result of a continuation.

        Args:
            evidence: Evidence for its first token.
            num_right: Number of tokens predicted correctly.
            is_missed: Whether a wrong one followed.
        """
        while num_right:
            step = _step_of(evidence)
            num_here = num_right
            if step < _LAST:
                num_here = min(num_right, -((evidence - _STEPS[step + 1]) // PER_TOKEN))
            self._note(step, num_here, num_here)
            num_right -= num_here
            evidence += PER_TOKEN * num_here
        if is_missed:
            self._note(_step_of(evidence), 0, 1)

    def _note(self, step: int, num_hits: int, num_trials: int) -> None:
        self._hits[step] += num_hits
        self._trials[step] += num_trials
        self._chances[step] = self._hits[step] / self._trials[step]


class CursorPosition(NamedTuple):
    """Position of a sequence in the known text."""

    source: int | None = None
    """Position of the predicted next token, or None if there is none."""
    evidence: int = 0
    """Evidence for it (`speculative.ngram_search`)."""
    num_followed: int = 0
    """Number of correctly predicted tokens since the position was found."""
    anchor: int | None = None
    """Position where the text was left, or None."""
    num_diverged: int = 0
    """Tokens since then."""


# While a sequence follows the known text, following costs one comparison. Where it departs, the position is
# kept as an *anchor*: edited text returns to the original a little after the position where it left it, so
# one matching token there is stronger evidence than two elsewhere. All other positions are found by the
# longest match.
class IndexCursor:
    """Follows a sequence through an index.

    Args:
        index: The known text.
        is_own_text: Whether the index holds the sequence itself and grows with it: then a continuation may
            run into the end and repeat the proposal.
        tokens_per_evidence: Number of tokens predicted for each unit of evidence.
        table: Probabilities for texts of this kind, shared; None for one of its own.
    """

    def __init__(
        self,
        index: NgramIndex,
        *,
        is_own_text: bool,
        tokens_per_evidence: float,
        table: EvidenceTable | None = None,
    ) -> None:
        self._index = index
        self._is_own_text = is_own_text
        self._tokens_per_evidence = tokens_per_evidence
        self._table = table or EvidenceTable()
        self._position = CursorPosition()
        self._tail: list[int] = []

    def start(self, tokens: Sequence[int], position: CursorPosition | None = None) -> None:
        """Take the text before the sequence, without learning from it.

        Args:
            tokens: Its end is sufficient.
            position: Position of the sequence after them; None to search for it.
        """
        self._tail = list(tokens[-MAX_ORDER:])
        if position is None:
            position = self._find(self._tail, None, 0)
            position = position._replace(evidence=min(position.evidence, _AT_START))
        self._position = position

    def advance(self, tokens: Sequence[int]) -> int:
        """Follow committed tokens, and learn from the predictions.

        Returns:
            Number of first tokens that were copied from the younger half of the index.
        """
        position = self._position
        foretold = self._predicted(position, len(tokens), ())
        num_right = _num_equal(foretold, tokens)
        if foretold:
            self._table.learn(position.evidence, num_right, is_missed=num_right < len(foretold))
        self._tail = [*self._tail, *tokens][-MAX_ORDER:]
        self._position = self._moved(position, num_right, len(tokens), self._tail)
        is_young = position.source is not None and position.source >= self._index.young_first
        return num_right if is_young else 0

    def predict(self, max_tokens: int, ahead: Sequence[int], name: str) -> Proposal:
        """Prediction of the tokens after the committed ones and `ahead`.

        Args:
            max_tokens: Most tokens.
            ahead: Tokens in flight.
            name: Name of the proposer.
        """
        if max_tokens <= 0:
            return EMPTY
        position = self._position
        if ahead:
            num_right = _num_equal(self._predicted(position, len(ahead), ()), ahead)
            position = self._moved(
                position, num_right, len(ahead), [*self._tail, *ahead[-MAX_ORDER:]][-MAX_ORDER:]
            )
        width = min(max_tokens, int(position.evidence * self._tokens_per_evidence))
        tokens = self._predicted(position, width, ahead)
        if not tokens:
            return EMPTY
        return Proposal(tuple(tokens), self._table.chances(position.evidence, len(tokens)), name)

    def _predicted(self, position: CursorPosition, count: int, ahead: Sequence[int]) -> list[int]:
        """The next `count` tokens from a position, or fewer if the text ends before."""
        index, source = self._index, position.source
        if source is None or source < index.first or count <= 0:
            return []
        tokens = index.read(source, source + count)
        if len(tokens) < count and self._is_own_text:
            # A text that is repeating itself runs out of known tokens; its tokens in flight continue.
            tokens += ahead[max(0, source - index.stop) :]
            tokens = list(islice(cycle(tokens), count)) if tokens else tokens
        return tokens

    def _moved(
        self, position: CursorPosition, num_right: int, num_tokens: int, tail: list[int]
    ) -> CursorPosition:
        """Position after `num_tokens` more, the first `num_right` of which were predicted correctly."""
        source, evidence, num_followed, anchor, num_diverged = position
        if source is None:
            return self._find(tail, anchor, num_diverged + num_tokens)
        left = source + num_right
        num_followed += num_right
        if num_right == num_tokens:
            return CursorPosition(left, evidence + PER_TOKEN * num_right, num_followed, anchor, num_diverged)
        if anchor is None or num_followed >= _SETTLED or 0 <= left - anchor <= _CLOSE:
            return self._find(tail, left, num_tokens - num_right)
        return self._find(tail, anchor, num_diverged + num_followed + num_tokens - num_right)

    def _find(self, tail: list[int], anchor: int | None, num_diverged: int) -> CursorPosition:
        """The likeliest position by the last tokens: the longest match, or a shorter one near the anchor."""
        index = self._index
        source, evidence = None, 0
        match = index.find(tail)
        if match is not None:
            source, evidence = match.end, MATCHED[match.length]
        if anchor is not None and num_diverged > _MAX_DIVERGED:
            anchor = None
        if anchor is not None and tail:
            near = index.find_near(tail[-1], anchor, min(anchor + _REACH, index.stop - 1))
            if near is not None:
                distance = near - anchor
                near_evidence = MATCHED[index.agreement(near + 1, tail)]
                near_evidence += NEARBY[distance] if distance < len(NEARBY) else 0
                if near_evidence > evidence:
                    source, evidence = near + 1, near_evidence
        return CursorPosition(source, evidence, 0, anchor, num_diverged)


def _step_of(evidence: int) -> int:
    return _STEP_OF[evidence] if evidence < len(_STEP_OF) else _LAST


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    if len(left) == len(right) and left == list(right):
        return len(left)
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
