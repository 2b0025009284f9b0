"""Draft session: drafted text of one session.

The text has three parts: committed tokens, tokens in flight (proposed by any proposer, not judged yet), and
tokens drafted beyond those. Committed tokens that equal the drafted ones change nothing. The first that
differs cuts the text there; the KV cache up to the cut remains valid, so nothing is computed twice.

Bookkeeping only, without threads and llama.cpp. The text may change during a computation, so that has two
ends: `next_span` says what to compute, `computed` enters the result, and between them the session tracks
which part of it is still valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from speculative.draft.context import DraftSpan
from speculative.proposer import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from speculative.draft.context import DraftOptions


@dataclass(frozen=True)
class DraftedToken:
    """Next token by the draft model."""

    id: int
    """Token id."""
    probability: float
    """Its probability by the draft model, at temperature 1."""
    depth: int = 0
    """Its distance from the last feature, at least 1; 0 for draft models that read none."""


class DraftSequence:
    """Text of one session, with as much drafted as was requested.

    Until the first request for a proposal only the prompt is computed, with low priority; beyond requests
    little is. So a session that does not speculate costs next to nothing.

    This is the text of draft models; kinds whose rows read more than tokens derive theirs.

    Args:
        name: Name in its proposals.
        options: Options of the draft model.
        is_end: Whether a token ends an answer; nothing is drafted after one that is not in flight.

    Attributes:
        name: As given.
        tokens: The text.
        num_cached: Number of its first tokens in the KV cache.
        is_urgent: Whether a proposal waits for its rows.
    """

    # Whether it drafts as far as `draft_max` beyond what was requested.
    _drafts_ahead: ClassVar[bool] = True

    def __init__(self, name: str, options: DraftOptions, is_end: Callable[[int], bool]) -> None:
        self.name = name
        self.tokens: list[int] = []
        self.num_cached = 0
        self.is_urgent = False
        self._options = options
        self._is_end = is_end
        self._num_committed = 0
        # Of the tokens after the committed ones; None for those of other proposers.
        self._drafted: list[DraftedToken | None] = []
        # Positions up to which it computes tokens of others, and drafts by itself.
        self._follow_until = 0
        self._draft_until = 0
        self._is_unsure = False
        # In the latest request.
        self._num_asked = 0
        self._running: DraftSpan | None = None
        # Length of the text that was not changed since the running span began.
        self._num_unchanged = 0

    @property
    def is_running_in_vain(self) -> bool:
        """Whether the running computation is of no use any more."""
        return self._running is not None and self._num_unchanged <= self._running.start

    @property
    def num_wanted_rows(self) -> int:
        """Number of rows that it could use now."""
        start, stop = self._missing_rows()
        return max(0, stop - start)

    @property
    def num_reusable(self) -> int:
        """Number of its first tokens whose rows another session may reuse."""
        return self.num_cached

    def adopt(self, num_cached: int, former: DraftSequence | None = None) -> None:  # noqa: ARG002
        """Record that its slot already holds this many of its first tokens.

        Args:
            num_cached: Number of tokens.
            former: Text that the slot held before; of use for drafters that read features.
        """
        self.num_cached = num_cached

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens: the prompt first."""
        if not self.tokens:
            self._follow_until = len(tokens)
        self._agree(tokens)
        self._num_committed += len(tokens)
        del self._drafted[: len(tokens)]

    def propose(self, max_tokens: int, after: Sequence[int]) -> Proposal:
        """Tokens drafted after the committed ones and `after`; requests more.

        Args:
            max_tokens: Most tokens; with 0 or fewer only `after` is computed.
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
        self._draft_until = begin + max_tokens
        if self._drafts_ahead:
            self._draft_until = begin + max(self._options.draft_max, max_tokens)
        num_ready = min(len(self.tokens) - begin, max_tokens)
        self._num_asked = max_tokens
        if num_ready < min(self._options.draft_min, max_tokens):
            return EMPTY
        stop = begin + num_ready
        ours = [own for own in self._drafted[len(after) : len(after) + num_ready] if own is not None]
        confidences = tuple(own.probability for own in ours)
        depths = tuple(own.depth for own in ours if own.depth)
        return Proposal(tuple(self.tokens[begin:stop]), confidences, self.name, depths)

    def next_span(self, max_rows: int) -> DraftSpan | None:
        """Rows to compute now, at most `max_rows`; None if there is nothing to do.

        `computed` or `dropped` must be called before the next call.
        """
        self._running = self._plan(max_rows)
        if self._running is not None:
            self._num_unchanged = self._running.stop
        return self._running

    def computed(
        self,
        drafted: Sequence[DraftedToken] = (),
        state: NDArray[np.float32] | None = None,  # noqa: ARG002 - of use for drafters that read features
    ) -> bool:
        """Record that the running span is in the cache.

        Args:
            drafted: Next tokens by its output, if it had one.
            state: Output state of that row, float32 (values,).

        Returns:
            Whether a short proposal would now be longer.
        """
        if self._running is None:
            raise RuntimeError("computed() without a span from next_span()")
        stop, self._running = self._running.stop, None
        self.num_cached = self._num_unchanged
        if self._num_unchanged < stop or len(self.tokens) > stop:
            return False
        for token in drafted:
            if token.probability < self._options.p_min:
                self._is_unsure = True
                break
            self.tokens.append(token.id)
            self._drafted.append(token)
            if self._is_end(token.id):
                break
        return len(self.tokens) > stop and self._is_worth_telling(stop - self._follow_until)

    def dropped(self) -> None:
        """Record that the running span was aborted: the cache holds none of its rows."""
        if self._running is not None:
            self._forget_rows(min(self._running.start, self._num_unchanged))
            self._running = None

    @property
    def _is_drafting(self) -> bool:
        num_tokens = len(self.tokens)
        if not 0 < num_tokens < self._draft_until or num_tokens > self._options.ctx_size or self._is_unsure:
            return False
        # After an end token only others continue, by sending or committing more.
        return num_tokens <= self._follow_until or not self._is_end(self.tokens[-1])

    def _plan(self, max_rows: int) -> DraftSpan | None:
        """Rows that are worth computing first."""
        start, stop = self._missing_rows()
        stop = min(stop, start + max_rows)
        if start >= stop:
            return None
        has_output = self._is_drafting and stop == len(self.tokens)
        return DraftSpan(start, tuple(self.tokens[start:stop]), has_output=has_output)

    def _missing_rows(self) -> tuple[int, int]:
        """Start and stop positions of the rows to compute."""
        if self._is_drafting:
            # The last row of a fully cached text is computed again, for its output.
            return min(self.num_cached, len(self.tokens) - 1), len(self.tokens)
        if self._num_committed > self._options.ctx_size:
            # Nothing will be drafted behind it.
            return self.num_cached, self.num_cached
        return self.num_cached, min(len(self.tokens), self._follow_until, self._options.ctx_size)

    def _is_worth_telling(self, num_ready_before: int) -> bool:
        num_ready = len(self.tokens) - self._follow_until
        return (
            num_ready >= min(self._options.draft_min, self._num_asked) and num_ready_before < self._num_asked
        )

    def _agree(self, tokens: Sequence[int]) -> None:
        """Replace the text after the committed tokens; drafted tokens remain as far as they agree."""
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
        self._drafted.extend([None] * (len(tokens) - num_known))

    def _forget_others(self, num_ahead: int) -> None:
        """Drop tokens of other proposers that are not in flight any more."""
        for index, own in enumerate(self._drafted[num_ahead:], num_ahead):
            if own is None:
                self._cut(index)
                return

    def _cut(self, num_ahead: int) -> None:
        """Keep only this many tokens after the committed ones."""
        cut = self._num_committed + num_ahead
        del self.tokens[cut:]
        del self._drafted[num_ahead:]
        self._forget_rows(cut)
        self._num_unchanged = min(self._num_unchanged, cut)
        self._is_unsure = False

    def _forget_rows(self, stop: int) -> None:
        """Take the rows from `stop` on for lost."""
        self.num_cached = min(self.num_cached, stop)
