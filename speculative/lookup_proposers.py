"""Lookup proposers: n-gram, predicted output, earlier answers and recorded ones.

Prompt lookup (Saxena 2023) with the longest possible n-gram, and with a memory of where it is: the session's
own text is followed as a reader's finger follows the line (`speculative.ngram_index`). The more speaks for a
place, the more is proposed: chance repeats are short, quotations and rewrites are long.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from speculative.ngram_index import CursorPosition, EvidenceTable, IndexCursor, NgramIndex
from speculative.proposer import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class NgramOptions:
    """How bold the proposer is, and how much it remembers.

    Attributes:
        tokens_per_evidence: Tokens proposed for each unit of evidence (`speculative.ngram_index`): a match of
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
        self._index = NgramIndex(options.max_indexed_tokens)
        self._cursor = IndexCursor(
            self._index, is_own_text=True, tokens_per_evidence=options.tokens_per_evidence
        )
        self._has_begun = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Index committed tokens: constant time each."""
        if self._has_begun:
            self._index.extend(tokens, self._cursor.advance(tokens))
        elif tokens:
            # The prompt is one text from outside; whether it repeats itself says nothing about the answer.
            self._index.extend(tokens)
            self._cursor.start(tokens)
            self._has_begun = True

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """How the known text goes on from where the committed tokens and `after` stand in it."""
        return self._cursor.predict(max_tokens, after, self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """It answers at once."""

    def close(self) -> None:
        """There is nothing to let go of."""


# A client that goes to the trouble means it: a handful of tokens at first, all of it once it proves right.
_TRUST: Final = CursorPosition(source=0, evidence=8, anchor=0)


class PredictionProposer:
    """Proposes from a text that the answer is expected to follow; see `speculative.proposer.Proposer`.

    Where the answer departs from it, the proposer looks for the place where it returns.

    Args:
        prediction: The expected answer, at least one token.
        tokens_per_evidence: How much is proposed for each unit of evidence (`speculative.ngram_index`).
    """

    name = "prediction"

    def __init__(self, prediction: Sequence[int], tokens_per_evidence: float = 4.0) -> None:
        index = NgramIndex(2 * len(prediction) + 2)
        index.extend(prediction)
        self._cursor = IndexCursor(index, is_own_text=False, tokens_per_evidence=tokens_per_evidence)
        self._has_begun = False

    def extend(self, tokens: Sequence[int]) -> None:
        """The prompt, then committed tokens, which are looked up in the prediction."""
        if self._has_begun:
            self._cursor.advance(tokens)
        elif tokens:
            self._cursor.start((), _TRUST)
            self._has_begun = True

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """How the prediction goes on from where the committed tokens and `after` stand in it."""
        return self._cursor.predict(max_tokens, after, self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """It answers at once."""

    def close(self) -> None:
        """There is nothing to let go of."""


# Off unless the operator asks for it. Answers are kept per key and never cross from one to another: what a
# key is proposed, and so how fast its answers come, depends on its own requests alone.
_MAX_PROMPTS: Final = 1024
# The very same question: what was answered before is very likely said again.
_ASKED_BEFORE: Final = 64


class History:
    """The answers to one key.

    Args:
        max_tokens: Beyond this many, the older half is forgotten. Each takes about 0.5 KB.

    Attributes:
        answers: All of them, one behind the other.
        table: How likely an answer goes on like an earlier one, learned by all sessions: answers to different
            questions share their phrases more than their course.
    """

    def __init__(self, max_tokens: int) -> None:
        self.answers = NgramIndex(max_tokens)
        self.table = EvidenceTable()
        # Where the answer to a prompt begins, the latest last. Prompts are told apart by their hash: were two
        # taken for one, a proposal would be wrong, nothing else.
        self._starts: OrderedDict[int, int] = OrderedDict()

    def add(self, prompt_hash: int, answer: Sequence[int]) -> None:
        """Keep an answer; it takes the place of an earlier one to the same prompt."""
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
        """Position of the answer to a prompt, unless it is forgotten."""
        start = self._starts.get(prompt_hash)
        return start if start is not None and start >= self.answers.first else None


class Histories:
    """The histories of several keys; the one not used for longest goes first.

    Args:
        max_keys: How many are kept.
        max_tokens: What each holds at most.

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
    """Proposes from earlier answers, and adds its session's own; see `speculative.proposer.Proposer`.

    Args:
        history: Of the session's key.
        tokens_per_evidence: How much is proposed for each unit of evidence (`speculative.ngram_index`).
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
        """The prompt, which may have been asked before, then committed tokens."""
        if self._prompt_hash is not None:
            self._answer.extend(tokens)
            self._cursor.advance(tokens)
        elif tokens:
            self._prompt_hash = hash(tuple(tokens))
            start = self._history.start_of(self._prompt_hash)
            # How prompts end is the chat template's doing: it says nothing about the answer.
            evidence = 0 if start is None else _ASKED_BEFORE
            self._cursor.start((), CursorPosition(source=start, evidence=evidence, anchor=start))

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """How an earlier answer went on from where the committed tokens and `after` stand in it."""
        return self._cursor.predict(max_tokens, after, self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """It answers at once."""

    def close(self) -> None:
        """Leave the answer to the sessions that come."""
        if self._prompt_hash is not None:
            self._history.add(self._prompt_hash, self._answer)
        self._answer = []


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
        index = NgramIndex(2 * len(self._answer) + 2)
        index.extend(self._answer)
        self._cursor = IndexCursor(index, is_own_text=False, tokens_per_evidence=4.0)
        self._cursor.start((), CursorPosition(source=0, evidence=128, anchor=0) if answer else None)
        self._has_begun = False
        self._num_committed = 0
        self._has_diverged = not answer

    def extend(self, tokens: Sequence[int]) -> None:
        """The prompt, which says nothing, then committed tokens."""
        if not self._has_begun:
            self._has_begun = bool(tokens)
            return
        self._has_diverged = self._has_diverged or not self._continuation(tokens)
        self._num_committed += len(tokens)
        self._cursor.advance(tokens)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """The recorded tokens from there on."""
        if self._has_diverged or not self._continuation(after):
            return self._cursor.predict(max_tokens, after, self.name)
        start = self._num_committed + len(after)
        tokens = self._answer[start : start + max(max_tokens, 0)]
        return Proposal(tokens, (1.0,) * len(tokens), self.name) if tokens else EMPTY

    def listen(self, on_ready: Callable[[], None]) -> None:
        """It answers at once."""

    def close(self) -> None:
        """There is nothing to let go of."""

    def _continuation(self, tokens: Sequence[int]) -> bool:
        start = self._num_committed
        return self._answer[start : start + len(tokens)] == tuple(tokens)
