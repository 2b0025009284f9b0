"""Draft sequences: drafted text of one session, from tokens alone or from hidden states of the target.

The text has three parts: committed tokens, tokens in flight (proposed by any proposer, not judged yet), and
tokens drafted beyond those. Committed tokens that equal the drafted ones change nothing. The first that
differs cuts the text there; the KV cache up to the cut remains valid, so nothing is computed twice.

Bookkeeping only, without threads and llama.cpp. The text may change during a computation, so that has two
ends: `next_span` says what to compute, `computed` enters the result, and between them the session tracks
which part of it is still valid.

The row for token i consumes that token and the target's feature at position i - 1, and predicts token i + 1
(EAGLE-3, Li et al. 2025; multi-token prediction, DeepSeek-V3 2024). *Real* rows have a feature of the target.
*Chain* rows follow them and consume the output state of the row before instead. The last real row before a
chain is its *anchor*; the depth of a drafted token is its distance from the anchor. Drafts get worse with
depth, so a chain ends `draft_max` tokens behind its anchor.

While windows are in flight and all is accepted, a chain goes on from its own states. Once it has ended, or
the text was cut by a rejection, it begins again: features that have come since give real rows in place of
chain rows, the last of them is the new anchor, and tokens in flight behind it are followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from speculative.draft.context import DraftSpan
from speculative.proposer import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from speculative.draft.context import DraftOptions

# Features of the latest positions that are kept, for the next session with the same beginning.
MOST_FEATURES: Final = 512
# Consecutive features after a gap with which a sequence begins anew, without the rows before.
_LEAST_ANEW: Final = 16
# Fewer features than these wait until a proposal is requested.
_LEAST_UNASKED: Final = 32


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
        first_row: Index of the first token that has a row.
        is_urgent: Whether a proposal waits for its rows.
    """

    # Whether it drafts as far as `draft_max` beyond what was requested.
    _drafts_ahead: ClassVar[bool] = True

    def __init__(self, name: str, options: DraftOptions, is_end: Callable[[int], bool]) -> None:
        self.name = name
        self.tokens: list[int] = []
        self.num_cached = 0
        self.first_row = 0
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


@dataclass(frozen=True)
class FeatureSpan(DraftSpan):
    """Real rows, then at most one chain row."""

    features: NDArray[np.float32]
    """float32 (real rows, values): features of the positions before the first rows' tokens."""
    state: NDArray[np.float32] | None
    """float32 (values,): output state of the row before, for a last row without a feature."""
    is_anew: bool = field(kw_only=True)
    """Whether the cache's rows before `start` are invalid as well."""


class FeatureSequence(DraftSequence):
    """Text of one session with features, and as much drafted as was requested.

    Args:
        name: Name in its proposals.
        options: Options of the drafter; `draft_max` is the greatest depth.
        is_end: Whether a token ends an answer; nothing is drafted after one that is not in flight.
        zeros: float32 (values,): feature of the position before the first token; None if the first token has
            no row, as in EAGLE-3.

    Attributes:
        features: Those that are kept, by position.
        real_stop: Index after the last token that has a real row.
    """

    # A draft behind the next feature is better than one ahead of it.
    _drafts_ahead = False

    _running: FeatureSpan | None

    def __init__(
        self,
        name: str,
        options: DraftOptions,
        is_end: Callable[[int], bool],
        *,
        zeros: NDArray[np.float32] | None = None,
    ) -> None:
        super().__init__(name, options, is_end)
        self._zeros = zeros
        self.features: dict[int, NDArray[np.float32]] = {}
        self._newest = -1
        # Behind the real rows those of the chain, up to `num_cached`.
        self.real_stop = 0
        self._anchor: int | None = None
        # Output states of the anchor's row and the chain's, by token.
        self._states: dict[int, NDArray[np.float32]] = {}

    @property
    def num_reusable(self) -> int:
        """Number of its first tokens whose rows another session may reuse."""
        real = self._real_rows()
        # What has no row yet, but a feature, counts as well.
        is_next = real is not None and (real[0] <= self.real_stop or self.real_stop <= self.first_row)
        return max(self.real_stop, real[1] + 1) if real is not None and is_next else self.real_stop

    def adopt(self, num_cached: int, former: DraftSequence | None = None) -> None:
        """Record that its slot already holds rows of this many of its first tokens; see `DraftSequence`."""
        if not isinstance(former, FeatureSequence) or num_cached <= former.first_row:
            return
        self.first_row = former.first_row
        self.real_stop = self.num_cached = min(num_cached, former.real_stop)
        for position, row in former.features.items():
            # The feature of a position depends on the tokens up to there.
            if position < num_cached:
                self.features.setdefault(position, row)
        self._newest = max(self.features, default=-1)

    def take_features(self, start: int, rows: NDArray[np.float32]) -> None:
        """Take features of committed positions; see `speculative.proposer.FeatureReader`."""
        for position, row in enumerate(rows, start):
            self.features[position] = row
        self._newest = max(self._newest, start + len(rows) - 1)
        if len(self.features) > MOST_FEATURES:
            for position in sorted(self.features)[: len(self.features) - MOST_FEATURES]:
                del self.features[position]

    @property
    def num_wanted_rows(self) -> int:
        """Number of rows that it could use now."""
        span = self._plan(max_rows=1 << 30)
        return 0 if span is None else len(span.tokens)

    def computed(
        self, drafted: Sequence[DraftedToken] = (), state: NDArray[np.float32] | None = None
    ) -> bool:
        """See `DraftSequence.computed`."""
        if (span := self._running) is not None:
            self._store(span, state)
            if self._anchor is not None:
                depths = count(span.stop - self._anchor)
                drafted = [replace(token, depth=depth) for token, depth in zip(drafted, depths, strict=False)]
        return super().computed(drafted)

    def dropped(self) -> None:
        """See `DraftSequence.dropped`."""
        if self._running is not None and self._running.is_anew:
            self._forget_rows(0)
        super().dropped()

    def _store(self, span: FeatureSpan, state: NDArray[np.float32] | None) -> None:
        """Note which rows the cache now holds, and the output state of the last."""
        if span.is_anew:
            self.first_row = span.start
        self._forget_rows(span.start)
        if len(span.features):
            # Of committed tokens, which never change.
            self.real_stop = span.start + len(span.features)
        if state is None or self._num_unchanged < span.stop:
            return
        if span.state is None:
            self._anchor = span.stop - 1
            self._states.clear()
        if self._anchor is not None:
            self._states[span.stop - 1] = state

    def _forget_rows(self, stop: int) -> None:
        super()._forget_rows(stop)
        self.real_stop = min(self.real_stop, stop)
        if self._anchor is not None and self._anchor >= self.num_cached:
            self._anchor = None
            self._states.clear()
        for token in [token for token in self._states if token >= self.num_cached]:
            del self._states[token]

    def _plan(self, max_rows: int) -> FeatureSpan | None:
        # Behind the last position of the context nothing will be drafted.
        if not self.tokens or max_rows < 1 or self._num_committed > self._options.ctx_size:
            return None
        last = len(self.tokens) - 1
        real = self._real_rows()
        if not self._is_drafting:
            if real is None or not self._is_worth_reading(real):
                return None
            return self._real_span(*real, max_rows, has_output=False)
        is_last_real = real is not None and real[1] == last
        if self._can_go_on and not is_last_real:
            # The last row of a fully computed text is computed again, for its output.
            return self._chain_span(min(self.num_cached, last))
        if real is None or len(self.tokens) - real[1] > self._options.draft_max:
            return None
        return self._real_span(*real, max_rows, has_output=True)

    def _is_worth_reading(self, real: tuple[int, int]) -> bool:
        """Whether these real rows are worth computing though nothing is to be drafted behind them."""
        return real[1] - max(real[0], self.real_stop) >= _LEAST_UNASKED

    @property
    def _can_go_on(self) -> bool:
        """Whether the chain may reach the end of the text, and one token further."""
        if self._anchor is None or len(self.tokens) - self._anchor > self._options.draft_max:
            return False
        return min(self.num_cached, len(self.tokens) - 1) - 1 in self._states

    def _real_rows(self) -> tuple[int, int] | None:
        """First and last token whose rows are to be real ones next; None without features."""
        newest = min(self._newest + 1, self._num_committed - 1, self._options.ctx_size - 1)
        has_rows = self.real_stop > self.first_row
        end = self.real_stop if has_rows else 0
        while newest >= end and not self._has(newest - 1):
            newest -= 1
        first = newest
        while first > end and self._has(first - 2):
            first -= 1
        if has_rows and self._has(self.first_row - 2) and self._has_all(self.first_row - 1, newest):
            # Features of earlier positions have come since the first row was computed.
            first = self.first_row - 1
            while self._has(first - 2):
                first -= 1
            return first, newest
        if has_rows and (newest < end or (first > end and newest - first < _LEAST_ANEW)):
            # Nothing new, or behind a gap that late features may still fill: the last real row once more.
            first = newest = min(newest, end - 1)
        return (first, newest) if newest >= 0 and self._has(newest - 1) else None

    def _real_span(self, first: int, newest: int, max_rows: int, *, has_output: bool) -> FeatureSpan:
        stop = min(newest + has_output, first + max_rows)
        return FeatureSpan(
            first,
            tuple(self.tokens[first:stop]),
            np.stack([self._feature(token - 1) for token in range(first, stop)]),
            None,
            has_output=stop == newest + 1,
            is_anew=not self.first_row < first <= self.real_stop,
        )

    def _chain_span(self, token: int) -> FeatureSpan:
        state = self._states[token - 1]
        none = np.empty((0, len(state)), np.float32)
        return FeatureSpan(token, (self.tokens[token],), none, state, has_output=True, is_anew=False)

    def _has_all(self, start: int, stop: int) -> bool:
        return all(self._has(position) for position in range(start, stop))

    def _has(self, position: int) -> bool:
        return position in self.features or (position == -1 and self._zeros is not None)

    def _feature(self, position: int) -> NDArray[np.float32]:
        return self._zeros if position < 0 and self._zeros is not None else self.features[position]
