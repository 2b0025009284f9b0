"""Block sequences: drafted text of one session, a block at a time, from hidden states of the target.

A block drafter reads the target's features of a prefix of the text, and then drafts several tokens in one
pass: a row for the token that follows the prefix, its *anchor*, and rows of mask tokens behind it (DFlash,
Chen et al. 2026). Rows of features stay in the KV cache, as the real rows of `FeatureSequence` do; rows of a
block do not.

A block begins at the first position without a feature, and is drafted anew once features of later positions
have come. Tokens between the anchor and the end of the text in flight are known: as far as the block agrees
with all of them, what it says behind them is proposed; otherwise nothing is. No block is drafted behind
another one, since it would read mask tokens where the drafter was trained to read features.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from speculative.draft.session import DraftedToken, FeatureSequence, FeatureSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from speculative.draft.context import DraftOptions
    from speculative.proposer import Proposal

# A block from the same anchor as the last one has so many times its tokens, or is not drafted.
_LEAST_LONGER: Final = 1.5


@dataclass(frozen=True)
class BlockSpan(FeatureSpan):
    """Real rows, and a block behind them that begins with the last row's token."""

    num_drafted: int = field(kw_only=True)
    """Tokens to draft; 0 for no block."""


@dataclass(frozen=True)
class _Block:
    """The newest block."""

    anchor: int
    """Index of its first row's token."""
    num_wanted: int
    """Tokens that were to be drafted."""
    tokens: tuple[DraftedToken, ...]
    """Those that were drafted, for the positions behind the anchor."""


class BlockSequence(FeatureSequence):
    """Text of one session with features, and a block drafted behind them.

    Args:
        name: Name in its proposals.
        options: Options of the drafter.
        is_end: Whether a token ends an answer; nothing is proposed after one that is not in flight.
        most_drafted: Most tokens of a block.
    """

    _running: BlockSpan | None

    def __init__(
        self, name: str, options: DraftOptions, is_end: Callable[[int], bool], *, most_drafted: int
    ) -> None:
        super().__init__(name, options, is_end)
        self._most_drafted = most_drafted
        self._block: _Block | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens: the prompt first."""
        super().extend(tokens)
        # A block for the tokens that were asked for before would be too short.
        self._draft_until = 0

    def propose(self, max_tokens: int, after: Sequence[int]) -> Proposal:
        """See `DraftSequence.propose`."""
        self._agree(after)
        self._lay(self._num_committed + len(after))
        return super().propose(max_tokens, after)

    def computed(
        self,
        drafted: Sequence[DraftedToken] = (),
        state: NDArray[np.float32] | None = None,  # noqa: ARG002 - blocks have none
    ) -> bool:
        """See `DraftSequence.computed`."""
        span = self._running
        if span is None:
            raise RuntimeError("computed() without a span from next_span()")
        self._running = None
        self._store(span, None)
        self.num_cached = self.real_stop
        if not span.has_output:
            return False
        tokens = tuple(replace(token, depth=depth) for depth, token in enumerate(drafted, 1))
        self._block = _Block(span.stop - 1, span.num_drafted, tokens)
        known_stop = self._known_stop
        num_ready_before = len(self.tokens) - known_stop
        self._lay(known_stop)
        return len(self.tokens) > known_stop and self._is_worth_telling(num_ready_before)

    @property
    def _known_stop(self) -> int:
        """Length of the text that is committed or in flight."""
        return min(len(self.tokens), max(self._num_committed, self._follow_until))

    def _lay(self, known_stop: int) -> None:
        """Put the newest block's tokens behind the known ones, if it agrees with those."""
        self._cut(known_stop - self._num_committed)
        block = self._block
        if block is None or self._newest_anchor() != block.anchor:
            return
        num_known = known_stop - block.anchor - 1
        if not self._agrees(block, num_known):
            return
        for token in block.tokens[num_known:]:
            if token.probability < self._options.p_min:
                break
            self.tokens.append(token.id)
            self._drafted.append(token)
            if self._is_end(token.id):
                break

    def _agrees(self, block: _Block, num_known: int) -> bool:
        """Whether a block says the known tokens behind its anchor, and more."""
        start = block.anchor + 1
        known = self.tokens[start : start + num_known]
        return [token.id for token in block.tokens[:num_known]] == known

    def _newest_anchor(self) -> int | None:
        real = self._real_rows()
        return None if real is None else real[1]

    def _plan(self, max_rows: int) -> BlockSpan | None:
        # Behind the last position of the context nothing will be drafted.
        if not self.tokens or max_rows < 1 or self._num_committed > self._options.ctx_size:
            return None
        real = self._real_rows()
        if real is None:
            return None
        num_drafted = self._num_worth_drafting(real[1])
        if not num_drafted and not self._is_worth_reading(real):
            return None
        rows = self._real_span(*real, max_rows, has_output=num_drafted > 0)
        return BlockSpan(
            rows.start,
            rows.tokens,
            rows.features,
            None,
            has_output=rows.has_output,
            is_anew=rows.is_anew,
            num_drafted=num_drafted if rows.has_output else 0,
        )

    def _num_worth_drafting(self, anchor: int) -> int:
        """Tokens of a block behind this anchor; 0 if none reaches beyond what is known, or was drafted."""
        room = self._options.ctx_size - anchor - 1
        num_drafted = min(self._draft_until - anchor - 1, self._most_drafted, room)
        num_known = self._known_stop - anchor - 1
        if num_drafted <= num_known:
            return 0
        block = self._block
        if block is None or block.anchor != anchor:
            return num_drafted
        # The same tokens again, and a few more, are not worth a pass.
        is_longer = num_drafted >= _LEAST_LONGER * block.num_wanted
        says_the_same = self._agrees(block, min(num_known, len(block.tokens)))
        return num_drafted if is_longer and says_the_same else 0
