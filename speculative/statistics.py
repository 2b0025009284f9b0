"""Counts of what speculation did: immutable, added up from judgements, published elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from speculative.acceptance import Judgement, SpanClass


class SpanKind(NamedTuple):
    """A span class, with or without a stop inside.

    Attributes:
        span: How far the window held.
        has_stop: Whether an end token was drawn inside.
    """

    span: SpanClass
    has_stop: bool


@dataclass(frozen=True)
class SpeculationStatistics:
    """Counts over judged windows.

    Attributes:
        num_windows: Windows judged, plain ones too.
        num_drafts: Windows that proposed anything.
        num_committed: Tokens committed by all of them.
        proposed_per_position: Entry `i`: windows that proposed more than `i` tokens.
        accepted_per_position: Entry `i`: windows that had more than `i` of them accepted.
        spans: Windows of each kind.
    """

    num_windows: int = 0
    num_drafts: int = 0
    num_committed: int = 0
    proposed_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    spans: Mapping[SpanKind, int] = field(default_factory=dict)

    @property
    def num_proposed(self) -> int:
        """Proposed tokens that were verified."""
        return sum(self.proposed_per_position)

    @property
    def num_accepted(self) -> int:
        """Proposed tokens that the target drew too."""
        return sum(self.accepted_per_position)

    @property
    def mean_accepted(self) -> float:
        """Accepted tokens per window that proposed any; 0 if none did."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0

    @property
    def mean_committed(self) -> float:
        """Tokens per window, plain ones too: how many a trip around the ring brings; 0 without any."""
        return self.num_committed / self.num_windows if self.num_windows else 0.0

    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of windows that proposed a token at each position and had it accepted.

        It is unconditional: a token behind a rejected one counts as not accepted.
        """
        pairs = zip(self.accepted_per_position, self.proposed_per_position, strict=True)
        return tuple(accepted / proposed for accepted, proposed in pairs)

    def add(self, judgement: Judgement) -> SpeculationStatistics:
        """These counts and one window more."""
        kind = SpanKind(judgement.span, judgement.has_stop)
        reached = judgement.num_accepted
        one = SpeculationStatistics(
            num_windows=1,
            num_drafts=int(judgement.num_proposed > 0),
            num_committed=len(judgement.committed),
            proposed_per_position=(1,) * judgement.num_proposed,
            accepted_per_position=(1,) * reached + (0,) * (judgement.num_proposed - reached),
            spans={kind: 1},
        )
        return self.merge(one)

    def merge(self, other: SpeculationStatistics) -> SpeculationStatistics:
        """The counts of both."""
        kinds = [*self.spans, *(kind for kind in other.spans if kind not in self.spans)]
        return SpeculationStatistics(
            num_windows=self.num_windows + other.num_windows,
            num_drafts=self.num_drafts + other.num_drafts,
            num_committed=self.num_committed + other.num_committed,
            proposed_per_position=_sum(self.proposed_per_position, other.proposed_per_position),
            accepted_per_position=_sum(self.accepted_per_position, other.accepted_per_position),
            spans={kind: self.spans.get(kind, 0) + other.spans.get(kind, 0) for kind in kinds},
        )


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))
