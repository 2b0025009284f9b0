"""Acceptance of a window, acceptance rates and their calibration.

The tail draws a token after each row of the window and stops at the first that differs from the proposed
one (`proto/spanmesh_proto/windows.proto`, rule 4). Every token drawn is the target's own, so all of them
are committed, up to a stop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from speculative.proposer import Proposal


class SpanClass(StrEnum):
    """How far a window held; what it means for the rows that the stages have cached.

    Attributes:
        PLAIN: Nothing was proposed.
        FULL_ACCEPT: Every proposed token was drawn: every row stays.
        TAIL_REJECT: All but the last: one row to trim, which the next window does by its start.
        EARLY_REJECT: Rows after the first difference were computed for nothing.
    """

    PLAIN = "plain"
    FULL_ACCEPT = "full_accept"
    TAIL_REJECT = "tail_reject"
    EARLY_REJECT = "early_reject"


@dataclass(frozen=True)
class Judgement:
    """A window and its verdict, put together.

    Attributes:
        committed: What joins the sequence: one id or more; an end token, if one was drawn, is the last.
        num_proposed: Proposed tokens in the window.
        num_accepted: Those among them that were drawn and committed.
        span: How far the window held.
        has_stop: Whether an end token was drawn inside.
    """

    committed: tuple[int, ...]
    num_proposed: int
    num_accepted: int
    span: SpanClass
    has_stop: bool = False

    @property
    def is_rejected(self) -> bool:
        """Whether the stages hold rows of tokens that did not happen."""
        return self.span in {SpanClass.TAIL_REJECT, SpanClass.EARLY_REJECT}


def judge(
    proposed: Sequence[int],
    sampled: Sequence[int],
    *,
    num_confirmed: int = 0,
    end_tokens: Collection[int] = (),
    max_committed: int | None = None,
) -> Judgement:
    """Match a verdict with what its window proposed.

    With 7 8 9 proposed: `[7, 8, 9, 4]` is a full accept and a free prediction, `[7, 8, 5]` a tail reject and
    `[6]` an early one.

    Args:
        proposed: Proposed tokens of the window that the verdict is about, in order; none for a plain window.
        sampled: The verdict's ids.
        num_confirmed: Tokens before those that were proposed too and are committed already: the first of a
            window that flew behind another one, whose free prediction it was.
        end_tokens: Ids that end the sequence.
        max_committed: At most this many ids may still be committed; None for no limit.

    Raises:
        ValueError: If the verdict cannot belong to the window.
    """
    num_matched = len(sampled) - 1
    is_whole = num_matched == len(proposed)
    if not 0 <= num_matched <= len(proposed) or list(sampled[:-1]) != list(proposed[:num_matched]):
        raise ValueError(
            f"a verdict of {len(sampled)} ids does not continue a window of {len(proposed)} proposed"
        )
    if not is_whole and sampled[-1] == proposed[num_matched]:
        raise ValueError(f"a verdict of {len(sampled)} ids ends early on a token that was proposed there")

    committed = tuple(sampled[:max_committed])
    stop = next((index for index, token in enumerate(committed) if token in end_tokens), None)
    if stop is not None:
        committed = committed[: stop + 1]
    return Judgement(
        committed=committed,
        num_proposed=num_confirmed + len(proposed),
        num_accepted=num_confirmed + min(num_matched, len(committed)),
        span=_span_class(num_confirmed + len(proposed), num_confirmed + num_matched),
        has_stop=stop is not None,
    )


def judge_unread(num_proposed: int) -> Judgement:
    """What became of a window whose first token already differs from the free prediction before it.

    Args:
        num_proposed: Its tokens: a window that flies behind another one has no others.
    """
    return Judgement((), num_proposed, 0, _span_class(num_proposed, 0))


def _span_class(num_proposed: int, num_matched: int) -> SpanClass:
    if num_proposed == 0:
        return SpanClass.PLAIN
    if num_matched == num_proposed:
        return SpanClass.FULL_ACCEPT
    return SpanClass.TAIL_REJECT if num_matched == num_proposed - 1 else SpanClass.EARLY_REJECT


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
            proposed_per_position=_num_reaching([draft.num_proposed for draft in drafts], width),
            accepted_per_position=_num_reaching([draft.num_accepted for draft in drafts], width),
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


def _num_reaching(lengths: Sequence[int], width: int) -> tuple[int, ...]:
    """How many of `lengths` exceed each of 0, 1, … `width` - 1."""
    ends = Counter(lengths)
    left, survivors = len(lengths), []
    for position in range(width):
        left -= ends[position]
        survivors.append(left)
    return tuple(survivors)


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))


NUM_BUCKETS: Final = 8


class AcceptanceTable:
    """Judged tokens by proposer and confidence. Old ones fade.

    Args:
        memory: How many judgements a bucket remembers, about.
    """

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._accepted: dict[tuple[str, int], float] = {}
        self._judged: dict[tuple[str, int], float] = {}

    def add(self, proposer: str, confidence: float, *, is_accepted: bool) -> None:
        """One token was judged."""
        bucket = (proposer, bucket_of(confidence))
        self._accepted[bucket] = self._accepted.get(bucket, 0.0) * self._keep + is_accepted
        self._judged[bucket] = self._judged.get(bucket, 0.0) * self._keep + 1.0

    def mean(self, proposer: str) -> float | None:
        """The acceptance seen at any confidence; None if nothing was judged."""
        judged = sum(self._judged.get((proposer, bucket), 0.0) for bucket in range(NUM_BUCKETS))
        accepted = sum(self._accepted.get((proposer, bucket), 0.0) for bucket in range(NUM_BUCKETS))
        return accepted / judged if judged else None

    def estimate(self, proposer: str, confidence: float, prior: float, prior_weight: float) -> float:
        """The acceptance seen at this confidence; few judgements leave it near `prior`."""
        bucket = (proposer, bucket_of(confidence))
        accepted, judged = self._accepted.get(bucket, 0.0), self._judged.get(bucket, 0.0)
        return (accepted + prior * prior_weight) / (judged + prior_weight)


class Calibration:
    """One session's view: its own judgements over those of all sessions over the proposer's word.

    Args:
        shared: Of all sessions of a coordinator; learns along.
    """

    _MEMORY: Final = 24.0
    # How many judgements of its own make a session's view weigh as much as what all sessions saw.
    _SHARED_WEIGHT: Final = 4.0
    _WORD_WEIGHT: Final = 4.0

    def __init__(self, shared: AcceptanceTable) -> None:
        self._shared = shared
        self._own = AcceptanceTable(self._MEMORY)

    def acceptances(self, proposal: Proposal) -> tuple[float, ...]:
        """The chance of each token, given that those before it are right."""
        return tuple(self.acceptance(proposal.proposer, confidence) for confidence in proposal.confidences)

    def acceptance(self, proposer: str, confidence: float) -> float:
        """The chance of a token that the proposer is so sure of."""
        word = min(max(confidence, 0.0), 1.0)
        prior = self._shared.estimate(proposer, word, word, self._WORD_WEIGHT)
        return self._own.estimate(proposer, word, prior, self._SHARED_WEIGHT)

    def mean(self, proposer: str) -> float | None:
        """How often the proposer's tokens are right in this session; None if none was judged."""
        return self._own.mean(proposer)

    def judged(self, proposal: Proposal, num_accepted: int) -> None:
        """A window's tokens were judged, up to the first that was wrong."""
        for index, confidence in enumerate(proposal.confidences[: num_accepted + 1]):
            word = min(max(confidence, 0.0), 1.0)
            for table in (self._own, self._shared):
                table.add(proposal.proposer, word, is_accepted=index < num_accepted)


def bucket_of(confidence: float) -> int:
    """Which bucket a confidence in [0, 1] falls into."""
    return min(int(confidence * NUM_BUCKETS), NUM_BUCKETS - 1)
