"""N-gram index: the hash index of a growing text, a cursor in it, confidence by evidence.

For a few lengths the index keeps, of every n-gram, the place of its latest occurrence. The longest match of a
context is found by trying the lengths upwards and reading on backwards from there. Tokens are entered in bulk
by `dict.update`, which costs a fraction of what a suffix automaton does in Python, and text that was copied
from elsewhere in the index is not entered again. Old text is forgotten one generation at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import cycle, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from speculative.proposer import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence


ORDERS: Final = (2, 4, 8)
# Matches are told apart up to this length.
MAX_ORDER: Final = 16
_STEPS_BACK: Final = (8, 4, 2, 1, 1)
# So many n-grams and fewer are entered one by one: for them that is quicker than in bulk.
_FEW: Final = 4


class Occurrence(NamedTuple):
    """Where a context was found.

    Attributes:
        end: Position of the token that followed it.
        length: Tokens of the context that agree, at most `MAX_ORDER`.
    """

    end: int
    length: int


class NgramIndex:
    """The tokens of a text by position, and where n-grams ended last.

    Positions count from the text's first token and stay what they are when old text is forgotten.

    Args:
        max_tokens: How much text is kept: at least half of this, at most all of it.

    Attributes:
        first: Position of the first token that is kept.
        young_first: Position of the first token that will be kept when old text is forgotten next.

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
        # Where the copied text that the index ends with began; None if it does not end with any.
        self._copied_from: int | None = None

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.first + len(self._tokens)

    def read(self, start: int, stop: int) -> list[int]:
        """The tokens at positions `[start, stop)`; `start` is not before `first`."""
        return self._tokens[start - self.first : stop - self.first]

    def extend(self, tokens: Sequence[int], num_copied: int = 0) -> None:
        """Add text.

        Args:
            tokens: What to add.
            num_copied: So many of the first are what followed in the younger half of the index, too: there is
                no need to find them here as well.
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
        """The latest occurrence of the longest n-gram at the end of `context`; two tokens at least."""
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
        """How many tokens before position `end` agree with the end of `context`, at most `MAX_ORDER`."""
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
        # N-grams that lie within a copy are known from where it was copied.
        if start < self._copied_from + ORDERS[-1]:
            self._enter(start, num_new, self._copied_from)
        if num_new < stop:
            self._enter(num_new, stop)
            self._copied_from = None

    def _enter(self, start: int, stop: int, copied_from: int | None = None) -> None:
        """Note the n-grams that end before the positions `[start, stop)`, but none within a copy."""
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


# Evidence is a small whole number: where a continuation was found sets its start (`MATCHED`, `NEARBY`), and
# each token that came as foretold adds two. Starting values and chances were fitted to rewritten files of
# five Python packages (not those of the benchmark); a session's own hits and misses correct the chances as it
# goes.
PER_TOKEN: Final = 2

# Evidence of a context that agrees over so many tokens; a match of one says next to nothing.
MATCHED: Final = (0, 2, 4, 5, 6, 6, 7, 7, 7, 7, 8, 8, 9, 9, 10, 10, 14)

# What is added for being found 0, 1, … tokens behind the place where the text was left.
NEARBY: Final = (4, *[2] * 3, *[1] * 12)

# From each of these amounts of evidence on, the chance that the next token comes as foretold.
_STEPS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 16, 24, 40, 64, 128)
_CHANCES: Final = (0.10, 0.19, 0.33, 0.46, 0.58, 0.67, 0.78, 0.86, 0.93, 0.96, 0.98, 0.991, 0.998)
_LAST: Final = len(_STEPS) - 1
# The step of each amount of evidence, up to where the last one begins.
_STEP_OF: Final = tuple(max(bisect_right(_STEPS, evidence) - 1, 0) for evidence in range(_STEPS[-1]))


class EvidenceTable:
    """The chance of the next token for each amount of evidence, learning as it goes.

    Args:
        prior_weight: How many of its own observations weigh as much as the fitted chance.
    """

    def __init__(self, prior_weight: float = 8.0) -> None:
        self._hits = [chance * prior_weight for chance in _CHANCES]
        self._trials = [prior_weight] * len(_STEPS)
        self._chances = list(_CHANCES)

    def chances(self, evidence: int, count: int) -> tuple[float, ...]:
        """For each of the next `count` tokens the chance that it is right if those before it were."""
        chances = self._chances
        steps = _STEP_OF[evidence : evidence + PER_TOKEN * count : PER_TOKEN]
        return tuple([chances[step] for step in steps]) + (chances[_LAST],) * (count - len(steps))

    def learn(self, evidence: int, num_right: int, *, is_missed: bool) -> None:
        """Note what became of a continuation.

        Args:
            evidence: For its first token.
            num_right: So many tokens came as foretold.
            is_missed: Whether then one did not.
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


def _step_of(evidence: int) -> int:
    return _STEP_OF[evidence] if evidence < len(_STEP_OF) else _LAST


# While the sequence says what the known text says, following costs one comparison. Where it departs, the
# place is kept as an *anchor*: edited text returns to the original a little behind the place where it left
# it, so one token found there says more than two found anywhere. Everything else is found by the longest
# match.
# How far behind the anchor a lone token is looked for, and after how much other text the anchor is given up.
_REACH: Final = 64
_MAX_DIVERGED: Final = 4096
# A continuation that held for this many tokens, or that began this close to the anchor, moves the anchor.
_SETTLED: Final = 8
_CLOSE: Final = 16
# Prompts end alike because a chat template ends them: at most so much evidence that answers begin alike.
_AT_START: Final = 4


class CursorPosition(NamedTuple):
    """Where a sequence stands in the known text.

    Attributes:
        source: Position of the token that should come next, or None if nothing is known.
        evidence: How much speaks for it (`speculative.ngram_index`).
        num_followed: Tokens that came as foretold since the place was found.
        anchor: Position where the text was left, or None.
        num_diverged: Tokens since then.
    """

    source: int | None = None
    evidence: int = 0
    num_followed: int = 0
    anchor: int | None = None
    num_diverged: int = 0


class IndexCursor:
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
        """Take note of what goes before, without learning from it.

        Args:
            tokens: The end of it is enough.
            position: Where the sequence stands after them; None to look for it.
        """
        self._tail = list(tokens[-MAX_ORDER:])
        if position is None:
            position = self._find(self._tail, None, 0)
            position = position._replace(evidence=min(position.evidence, _AT_START))
        self._position = position

    def advance(self, tokens: Sequence[int]) -> int:
        """Follow committed tokens, and learn from how well they were foretold.

        Returns:
            How many of the first were copied from the younger half of the index.
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
        """What follows the committed tokens and then `ahead`.

        Args:
            max_tokens: At most so many.
            ahead: Tokens in flight.
            name: The proposer's.
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
        """The next `count` tokens from a place, or fewer if the text ends before."""
        index, source = self._index, position.source
        if source is None or source < index.first or count <= 0:
            return []
        tokens = index.read(source, source + count)
        if len(tokens) < count and self._is_own_text:
            # A text that repeats itself right now runs out of known tokens; what it is about to say goes on.
            tokens += ahead[max(0, source - index.stop) :]
            tokens = list(islice(cycle(tokens), count)) if tokens else tokens
        return tokens

    def _moved(
        self, position: CursorPosition, num_right: int, num_tokens: int, tail: list[int]
    ) -> CursorPosition:
        """The place after `num_tokens` more, the first `num_right` of which were foretold."""
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
        """The likeliest place by what was said last: the longest match, or a shorter one near the anchor."""
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
