"""Lookup proposers: n-grams, predicted outputs, earlier answers and recorded ones.

Prompt lookup (Saxena 2023) with the longest matching n-gram, and with a cursor that follows the session's own
text (`speculative.ngram_search`). The stronger the evidence for a match, the more is proposed: chance repeats
are short, quotations and rewrites are long.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from speculative.ngram_search import CursorPosition, EvidenceTable, IndexCursor, NgramIndex
from speculative.proposer import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Tokens that are indexed at a time: about two milliseconds.
_PART: Final = 4096
# Of a longer prediction the rest is not used. Each token takes about 0.5 KB.
_MOST_PREDICTED: Final = 32768
# A prediction of the client is meant: some tokens at first, all of it once it proves right.
_TRUST: Final = CursorPosition(source=0, evidence=8, anchor=0)
# Off by default. Answers are kept per key and never used for another: proposals, and so the speed of answers,
# depend on the key's own requests only.
_MAX_PROMPTS: Final = 1024
# A repeated prompt: the earlier answer is very likely repeated.
_ASKED_BEFORE: Final = 64


@dataclass(frozen=True)
class NgramOptions:
    """Length of proposals and size of the index.

    Raises:
        ValueError: If a value is not positive.
    """

    tokens_per_evidence: float = 0.85
    """Tokens proposed for each unit of evidence (`speculative.ngram_search`): a match of two tokens anywhere
    counts 4, one of four tokens 6, each correctly predicted token 2 more."""
    max_indexed_tokens: int = 32768
    """Beyond this number the older half is dropped. Each takes about 0.5 KB."""

    def __post_init__(self) -> None:
        if self.tokens_per_evidence <= 0.0 or self.max_indexed_tokens < 2:
            raise ValueError(f"{self}: tokens_per_evidence must be positive, max_indexed_tokens 2 or more")


class _Reading:
    """Text on its way into an index, part by part.

    Args:
        index: The index.
        tokens: The text.

    Attributes:
        tokens: As given.
    """

    def __init__(self, index: NgramIndex, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._index = index
        self._num_read = 0

    def read_on(self) -> bool:
        """Enter the next part; returns whether there is more."""
        self._index.extend(self.tokens[self._num_read : self._num_read + _PART])
        self._num_read += _PART
        return self._num_read < len(self.tokens)


class NgramProposer:
    """Proposer from one session's own text; see `speculative.proposer.Proposer`.

    Args:
        options: Length of proposals and size of the index.
    """

    name = "ngram"

    def __init__(self, options: NgramOptions | None = None) -> None:
        options = options or NgramOptions()
        # With the first token beyond these a whole generation of the index would be dropped.
        self._most_prompt = options.max_indexed_tokens - 1
        self._index = NgramIndex(options.max_indexed_tokens)
        self._cursor = IndexCursor(
            self._index, is_own_text=True, tokens_per_evidence=options.tokens_per_evidence
        )
        self._reading: _Reading | None = None
        self._has_begun = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Index committed tokens: constant time each. Of a long prompt, only the end, see `read_on`."""
        if self._has_begun:
            self._read_all()
            self._index.extend(tokens, self._cursor.advance(tokens))
        elif tokens:
            self._reading = _Reading(self._index, tokens[-self._most_prompt :])
            self._has_begun = True
            self.read_on()

    def read_on(self) -> bool:
        """See `PartReader.read_on`."""
        reading = self._reading
        if reading is not None and not reading.read_on():
            self._reading = None
            # Repeats within the prompt say nothing about the answer.
            self._cursor.start(reading.tokens)
        return self._reading is not None

    def _read_all(self) -> None:
        while self.read_on():
            pass

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """Continuation of the known text after the committed tokens and `after`."""
        self._read_all()
        return self._cursor.predict(max_tokens, after, self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """No effect: proposals are never delayed."""

    def close(self) -> None:
        """No effect: it holds no resources."""


class PredictionProposer:
    """Proposer from a predicted output; see `speculative.proposer.Proposer`.

    Where the answer departs from it, the proposer searches for the position where it returns.

    Args:
        prediction: Token ids of the predicted output, at least one.
        tokens_per_evidence: Tokens proposed for each unit of evidence (`speculative.ngram_search`).
    """

    name = "prediction"

    def __init__(self, prediction: Sequence[int], tokens_per_evidence: float = 4.0) -> None:
        prediction = prediction[:_MOST_PREDICTED]
        index = NgramIndex(2 * len(prediction) + 2)
        self._reading: _Reading | None = _Reading(index, prediction)
        self._cursor = IndexCursor(index, is_own_text=False, tokens_per_evidence=tokens_per_evidence)
        self._has_begun = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the prompt, then committed tokens, which are searched in the prediction."""
        if self._has_begun:
            self._read_all()
            self._cursor.advance(tokens)
        elif tokens:
            self._cursor.start((), _TRUST)
            self._has_begun = True
            self.read_on()

    def read_on(self) -> bool:
        """See `PartReader.read_on`."""
        if self._reading is not None and not self._reading.read_on():
            self._reading = None
        return self._reading is not None

    def _read_all(self) -> None:
        while self.read_on():
            pass

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """Continuation of the prediction after the committed tokens and `after`."""
        self._read_all()
        return self._cursor.predict(max_tokens, after, self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """No effect: proposals are never delayed."""

    def close(self) -> None:
        """No effect: it holds no resources."""


class History:
    """Earlier answers of one key.

    Args:
        max_tokens: Beyond this number the older half is dropped. Each takes about 0.5 KB.

    Attributes:
        answers: All answers, concatenated.
        table: Acceptance by evidence, learned from all sessions: answers to different questions share phrases
            more than their course.
    """

    def __init__(self, max_tokens: int) -> None:
        self.answers = NgramIndex(max_tokens)
        self.table = EvidenceTable()
        # Start of the answer to each prompt, the latest last. Prompts are identified by their hash: a
        # collision would only cause wrong proposals.
        self._starts: OrderedDict[int, int] = OrderedDict()

    def add(self, prompt_hash: int, answer: Sequence[int]) -> None:
        """Add an answer; it replaces an earlier one to the same prompt."""
        if not answer:
            return
        known = self.start_of(prompt_hash)
        if known is None or self.answers.read(known, known + len(answer)) != list(answer):
            self._starts[prompt_hash] = self.answers.stop
            self.answers.extend(answer)
        self._starts.move_to_end(prompt_hash)
        if len(self._starts) > _MAX_PROMPTS:
            self._starts.popitem(last=False)

    def start_of(self, prompt_hash: int) -> int | None:
        """Position of the answer to a prompt, if it is still kept."""
        start = self._starts.get(prompt_hash)
        return start if start is not None and start >= self.answers.first else None


class Histories:
    """Histories of several keys; the least recently used is dropped.

    Args:
        max_keys: Most keys.
        max_tokens: Most tokens of each.

    Raises:
        ValueError: If a value is out of range.
    """

    def __init__(self, max_keys: int = 16, max_tokens: int = 16384) -> None:
        if max_keys < 1 or max_tokens < 2:
            raise ValueError(f"max_keys is {max_keys} and max_tokens {max_tokens}: give at least 1 and 2")
        self._max_keys = max_keys
        self._max_tokens = max_tokens
        self._histories: OrderedDict[str, History] = OrderedDict()

    def open(self, key: str) -> HistoryProposer:
        """A proposer for a new session of this key."""
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = History(self._max_tokens)
        self._histories.move_to_end(key)
        if len(self._histories) > self._max_keys:
            self._histories.popitem(last=False)
        return HistoryProposer(history)


class HistoryProposer:
    """Proposer from earlier answers; adds its session's own; see `speculative.proposer.Proposer`.

    Args:
        history: History of the session's key.
        tokens_per_evidence: Tokens proposed for each unit of evidence (`speculative.ngram_search`).
    """

    name = "history"

    def __init__(self, history: History, tokens_per_evidence: float = 1.0) -> None:
        self._history = history
        self._cursor = IndexCursor(
            history.answers,
            is_own_text=False,
            tokens_per_evidence=tokens_per_evidence,
            table=history.table,
        )
        self._prompt_hash: int | None = None
        self._answer: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the prompt, which may be a repeated one, then committed tokens."""
        if self._prompt_hash is not None:
            self._answer.extend(tokens)
            self._cursor.advance(tokens)
        elif tokens:
            self._prompt_hash = hash(tuple(tokens))
            start = self._history.start_of(self._prompt_hash)
            # Prompts end as the chat template ends them: no evidence for the answer.
            evidence = 0 if start is None else _ASKED_BEFORE
            self._cursor.start((), CursorPosition(source=start, evidence=evidence, anchor=start))

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """Continuation of an earlier answer after the committed tokens and `after`."""
        return self._cursor.predict(max_tokens, after, self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """No effect: proposals are never delayed."""

    def close(self) -> None:
        """Add the answer to the history."""
        if self._prompt_hash is not None:
            self._history.add(self._prompt_hash, self._answer)
        self._answer = []


class RatedAnswer:
    """A recorded answer as a drafter of given acceptance would draft it: wrong tokens are mixed in.

    Which tokens are wrong follows from the answer, the seed and the rates, so that a token that is right at
    some distance is right at every one with a higher rate.

    Args:
        answer: Token ids of the recorded answer; empty if there is none.
        rates: Acceptance by distance from the text that a draft follows, in [0, 1], given that all before is
            accepted. No draft is longer.
        seed: Of the wrong tokens.
        num_before: Tokens of the prompt.
    """

    def __init__(
        self, answer: Sequence[int], rates: Sequence[float], seed: int = 0, num_before: int = 0
    ) -> None:
        self._answer = tuple(answer)
        self._rates = tuple(rates)
        self._seed = seed
        self._num_before = num_before

    def drafted(self, start: int, num_ahead: int, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Token ids and their rates.

        Args:
            start: Index in the answer of the first token.
            num_ahead: Tokens between the text that the draft follows and the first token.
            count: Most tokens.
        """
        rates = self._rates[num_ahead : num_ahead + max(count, 0)]
        tokens = self._answer[start : start + len(rates)]
        ids = tuple(
            token if self._chance(start + index) < rates[index] else self._wrong(start + index)
            for index, token in enumerate(tokens)
        )
        return ids, rates[: len(ids)]

    def behind(self, text: Sequence[int], count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Token ids and their rates behind prompt and answer so far; none where the answer is another one."""
        start = len(text) - self._num_before
        if start < 0 or tuple(text[self._num_before :]) != self._answer[:start]:
            return (), ()
        return self.drafted(start, 0, count)

    def _chance(self, position: int) -> float:
        """A number in [0, 1) that the seed and the answer's token at the position decide."""
        text = f"{self._seed} {position} {self._answer[position]}".encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") / 2**64

    def _wrong(self, position: int) -> int:
        """Another token of the answer than the one at the position; its successor if there is no other."""
        right = self._answer[position]
        others = (token for token in self._answer[position + 1 :] + self._answer if token != right)
        return next(others, right + 1)


class ReplayProposer:
    """Proposer of a recorded answer; see `speculative.proposer.Proposer`.

    Certain for as long as the answer is the recorded one. Without the exact mode another batch shape may lead
    to another token; after that it searches for the position to continue.

    With rates it stands for a drafter of that acceptance that takes no time, see `RatedAnswer`: distances are
    those from the committed tokens.

    Args:
        answer: Token ids of the recorded answer; empty if there is none.
        rates: See `RatedAnswer`; empty for a draft without wrong tokens.
        seed: See `RatedAnswer`.
    """

    name = "replay"

    def __init__(self, answer: Sequence[int], rates: Sequence[float] = (), seed: int = 0) -> None:
        self._answer = tuple(answer)
        self._rated = RatedAnswer(answer, rates, seed) if rates else None
        index = NgramIndex(2 * len(self._answer) + 2)
        index.extend(self._answer)
        self._cursor = IndexCursor(index, is_own_text=False, tokens_per_evidence=4.0)
        self._cursor.start((), CursorPosition(source=0, evidence=128, anchor=0) if answer else None)
        self._has_begun = False
        self._num_committed = 0
        self._has_diverged = not answer

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the prompt, which is ignored, then committed tokens."""
        if not self._has_begun:
            self._has_begun = bool(tokens)
            return
        self._has_diverged = self._has_diverged or not self._continuation(tokens)
        self._num_committed += len(tokens)
        self._cursor.advance(tokens)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """The recorded tokens after the committed tokens and `after`."""
        if self._rated is not None:
            return self._drafted(self._rated, max_tokens, len(after))
        if self._has_diverged or not self._continuation(after):
            return self._cursor.predict(max_tokens, after, self.name)
        start = self._num_committed + len(after)
        tokens = self._answer[start : start + max(max_tokens, 0)]
        return Proposal(tokens, (1.0,) * len(tokens), self.name) if tokens else EMPTY

    def listen(self, on_ready: Callable[[], None]) -> None:
        """No effect: proposals are never delayed."""

    def close(self) -> None:
        """No effect: it holds no resources."""

    def _drafted(self, rated: RatedAnswer, max_tokens: int, num_ahead: int) -> Proposal:
        """Tokens as right as the rates say, behind so many in flight."""
        if self._has_diverged:
            return EMPTY
        tokens, rates = rated.drafted(self._num_committed + num_ahead, num_ahead, max_tokens)
        depths = tuple(range(num_ahead + 1, num_ahead + 1 + len(tokens)))
        return Proposal(tokens, rates, self.name, depths) if tokens else EMPTY

    def _continuation(self, tokens: Sequence[int]) -> bool:
        start = self._num_committed
        return self._answer[start : start + len(tokens)] == tuple(tokens)
