"""The history proposer: earlier answers to the same API key.

Off unless the operator asks for it. Answers are kept per key and never cross from one to another: what a key
is proposed, and so how fast its answers come, depends on its own requests alone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from speculative.evidence import EvidenceTable
from speculative.follower import Follower, Place
from speculative.gram_index import GramIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from speculative.proposal import Proposal

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
        self.answers = GramIndex(max_tokens)
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
        tokens_per_evidence: How much is proposed for each unit of evidence (`speculative.evidence`).
    """

    name = "history"

    def __init__(self, history: History, tokens_per_evidence: float = 1.0) -> None:
        self._history = history
        self._follower = Follower(
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
            self._follower.advance(tokens)
        elif tokens:
            self._prompt_hash = hash(tuple(tokens))
            start = self._history.start_of(self._prompt_hash)
            # How prompts end is the chat template's doing: it says nothing about the answer.
            evidence = 0 if start is None else _ASKED_BEFORE
            self._follower.start((), Place(source=start, evidence=evidence, anchor=start))

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """How an earlier answer went on from where the committed tokens and `after` stand in it."""
        return self._follower.foretell(max_tokens, after, self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """It answers at once."""

    def close(self) -> None:
        """Leave the answer to the sessions that come."""
        if self._prompt_hash is not None:
            self._history.add(self._prompt_hash, self._answer)
        self._answer = []
