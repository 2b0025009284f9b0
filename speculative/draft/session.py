"""Drafted text of one session.

The text has three parts: committed tokens, tokens in flight (proposed, by whomever, and not judged yet), and
tokens drafted beyond those. Committed tokens that are the drafted ones leave everything in place. The first
that differs cuts the text there; what the KV cache holds up to the cut stays, so nothing is computed twice.

Pure book-keeping: no thread, no llama.cpp. Computing takes time during which the text may change, so it has
two ends: `next_span` says what to compute, `computed` enters the result, and between them the line keeps
track of how much of it is still true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from speculative.proposer import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from speculative.draft.context import DraftOptions


@dataclass(frozen=True)
class DraftSpan:
    """Rows that a line wants computed.

    Attributes:
        start: Absolute position of the first; what the cache holds from there on is void.
        tokens: Token ids, one a row.
        is_drafting: Whether the last row is to tell the next token.
    """

    start: int
    tokens: tuple[int, ...]
    is_drafting: bool

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class DraftedToken:
    """What a draft model says next.

    Attributes:
        id: Token id.
        probability: The model's own, at temperature 1.
    """

    id: int
    probability: float


class DraftSequence:
    """One session's text, with as much drafted as was asked for.

    Until it is first asked for a proposal it only wants the prompt read, and that not urgently; beyond what
    was asked for it wants little. So a session that does not speculate costs next to nothing.

    Args:
        name: Signs its proposals.
        options: How far it drafts.
        is_end: Whether a token ends an answer; nothing is drafted behind one that is not in flight.

    Attributes:
        tokens: The text.
        num_cached: How many of its first tokens the KV cache holds.
        is_urgent: Whether anybody waits for what it wants computed.
    """

    def __init__(self, name: str, options: DraftOptions, is_end: Callable[[int], bool]) -> None:
        self.tokens: list[int] = []
        self.num_cached = 0
        self.is_urgent = False
        self._name = name
        self._options = options
        self._is_end = is_end
        self._num_committed = 0
        # Of the tokens behind the committed ones; None for those that others proposed.
        self._confidences: list[float | None] = []
        # Positions up to which it follows what others say, and drafts on by itself.
        self._follow_until = 0
        self._draft_until = 0
        self._is_unsure = False
        # By the latest proposal.
        self._num_asked = 0
        self._running: DraftSpan | None = None
        # How much of the text was not changed since the running span began.
        self._num_unchanged = 0

    @property
    def is_running_in_vain(self) -> bool:
        """Whether nothing of what is being computed is of use any more."""
        return self._running is not None and self._num_unchanged <= self._running.start

    @property
    def num_wanted_rows(self) -> int:
        """How many rows it could use now."""
        start, stop = self._missing_rows()
        return max(0, stop - start)

    def adopt(self, num_cached: int) -> None:
        """Note that the cache it was given already holds that many of its first tokens."""
        self.num_cached = num_cached

    def extend(self, tokens: Sequence[int]) -> None:
        """Take note of committed tokens: the prompt first."""
        if not self.tokens:
            self._follow_until = len(tokens)
        self._agree(tokens)
        self._num_committed += len(tokens)
        del self._confidences[: len(tokens)]

    def propose(self, max_tokens: int, after: Sequence[int]) -> Proposal:
        """What follows the committed tokens and then `after`, as far as it is drafted; ask for more to come.

        Args:
            max_tokens: At most this many; 0 or fewer only follows `after`.
            after: Tokens in flight.
        """
        self.is_urgent = True
        self._agree(after)
        self._forget_others(len(after))
        begin = self._num_committed + len(after)
        self._follow_until = begin
        if max_tokens <= 0:
            self._draft_until = begin
            self._num_asked = 0
            return EMPTY
        self._draft_until = begin + max(self._options.draft_max, max_tokens)
        num_ready = min(len(self.tokens) - begin, max_tokens)
        self._num_asked = max_tokens
        if num_ready < min(self._options.draft_min, max_tokens):
            return EMPTY
        stop = begin + num_ready
        ours = self._confidences[len(after) : len(after) + num_ready]
        confidences = tuple(own for own in ours if own is not None)
        return Proposal(tuple(self.tokens[begin:stop]), confidences, self._name)

    def next_span(self, max_rows: int) -> DraftSpan | None:
        """What to compute now, at most `max_rows` rows; None if there is nothing to do.

        `computed` must follow before it is called again.
        """
        start, stop = self._missing_rows()
        stop = min(stop, start + max_rows)
        if start >= stop:
            return None
        is_drafting = self._is_drafting and stop == len(self.tokens)
        self._running = DraftSpan(start, tuple(self.tokens[start:stop]), is_drafting)
        self._num_unchanged = stop
        return self._running

    def computed(self, drafted: DraftedToken | None = None) -> bool:
        """The running span is in the cache.

        Args:
            drafted: What its last row says comes next, if it was drafting.

        Returns:
            Whether a proposal that was short would now be longer.
        """
        if self._running is None:
            raise RuntimeError("computed() without a span from next_span()")
        stop, self._running = self._running.stop, None
        self.num_cached = self._num_unchanged
        if drafted is None or self._num_unchanged < stop or len(self.tokens) > stop:
            return False
        if drafted.probability < self._options.p_min:
            self._is_unsure = True
            return False
        self.tokens.append(drafted.id)
        self._confidences.append(drafted.probability)
        return self._is_worth_telling()

    def dropped(self) -> None:
        """The running span was given up: the cache holds none of its rows."""
        if self._running is not None:
            self.num_cached = min(self._running.start, self._num_unchanged)
            self._running = None

    @property
    def _is_drafting(self) -> bool:
        num_tokens = len(self.tokens)
        if not 0 < num_tokens < self._draft_until or num_tokens > self._options.ctx_size or self._is_unsure:
            return False
        # Only whoever sends an end token, or commits it, means to go on behind it.
        return num_tokens <= self._follow_until or not self._is_end(self.tokens[-1])

    def _missing_rows(self) -> tuple[int, int]:
        """Positions of the rows to compute, start and stop."""
        if self._is_drafting:
            # A text that is cached whole has lost what its last row said.
            return min(self.num_cached, len(self.tokens) - 1), len(self.tokens)
        return self.num_cached, min(len(self.tokens), self._follow_until, self._options.ctx_size)

    def _is_worth_telling(self) -> bool:
        num_ready = len(self.tokens) - self._follow_until
        return min(self._options.draft_min, self._num_asked) <= num_ready <= self._num_asked

    def _agree(self, tokens: Sequence[int]) -> None:
        """Make `tokens` what follows the committed ones; what was drafted stays as far as it agrees."""
        begin = self._num_committed
        num_known = 0
        for known, token in zip(self.tokens[begin:], tokens, strict=False):
            if known != token:
                break
            num_known += 1
        if num_known == len(tokens):
            return
        self._cut(num_known)
        self.tokens.extend(tokens[num_known:])
        self._confidences.extend([None] * (len(tokens) - num_known))

    def _forget_others(self, num_ahead: int) -> None:
        """Drop what others proposed and what is not in flight any more: it was never said here."""
        for index, own in enumerate(self._confidences[num_ahead:], num_ahead):
            if own is None:
                self._cut(index)
                return

    def _cut(self, num_ahead: int) -> None:
        """Keep only so many tokens behind the committed ones."""
        cut = self._num_committed + num_ahead
        del self.tokens[cut:]
        del self._confidences[num_ahead:]
        self.num_cached = min(self.num_cached, cut)
        self._num_unchanged = min(self._num_unchanged, cut)
        self._is_unsure = False
