"""Counts of what speculation did: immutable, added up from judgements, published elsewhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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

    @classmethod
    def of(cls, judgements: Sequence[Judgement]) -> SpeculationStatistics:
        """Counts over many windows at once."""
        drafts = [judgement for judgement in judgements if judgement.num_proposed]
        width = max((draft.num_proposed for draft in drafts), default=0)
        return cls(
            num_windows=len(judgements),
            num_drafts=len(drafts),
            num_committed=sum(len(judgement.committed) for judgement in judgements),
            proposed_per_position=_survivors([draft.num_proposed for draft in drafts], width),
            accepted_per_position=_survivors([draft.num_accepted for draft in drafts], width),
            spans=Counter(SpanKind(judgement.span, judgement.has_stop) for judgement in judgements),
        )

    def add(self, judgement: Judgement) -> SpeculationStatistics:
        """These counts and one window more."""
        return self.merge(SpeculationStatistics.of((judgement,)))

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


def _survivors(lengths: Sequence[int], width: int) -> tuple[int, ...]:
    """How many of `lengths` exceed each of 0, 1, … `width` - 1."""
    ends = Counter(lengths)
    left, survivors = len(lengths), []
    for position in range(width):
        left -= ends[position]
        survivors.append(left)
    return tuple(survivors)


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))
