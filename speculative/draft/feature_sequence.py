"""Feature sequence: drafted text of one session, from hidden states of the target.

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
from typing import TYPE_CHECKING, Final

import numpy as np

from speculative.draft.context import DraftSpan
from speculative.draft.session import DraftSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from speculative.draft.context import DraftOptions
    from speculative.draft.session import DraftedToken

# Features of the latest positions that are kept, for the next session with the same beginning.
MOST_FEATURES: Final = 512
# Consecutive features after a gap with which a sequence begins anew, without the rows before.
_LEAST_ANEW: Final = 16
# Fewer features than these wait until a proposal is requested.
_LEAST_UNASKED: Final = 32


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
        first_row: Index of the first token that has a row.
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
        self.first_row = 0
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
            if real is None or real[1] - max(real[0], self.real_stop) < _LEAST_UNASKED:
                return None
            return self._real_span(*real, max_rows, has_output=False)
        is_last_real = real is not None and real[1] == last
        if self._can_go_on and not is_last_real:
            # The last row of a fully computed text is computed again, for its output.
            return self._chain_span(min(self.num_cached, last))
        if real is None or len(self.tokens) - real[1] > self._options.draft_max:
            return None
        return self._real_span(*real, max_rows, has_output=True)

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
