"""Acceptance: judgement of a window, statistics, calibrated confidences, and what the controller is told.

The tail samples a token after each row of the window and stops at the first that differs from the proposed
one (`proto/spanmesh_proto/windows.proto`, rule 4). Every sampled token is the target's own, so all of them
are committed, up to a stop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from speculative.proposer import Proposal

NUM_BUCKETS: Final = 8
# Greater depths are those of long blocks.
_DEEP: Final = 8
# Acceptance of a proposer that nothing is known of.
_EVEN: Final = 0.5


class SpanClass(StrEnum):
    """Accepted part of a window, and so the number of valid cached rows of the stages."""

    PLAIN = "plain"
    """Nothing was proposed."""
    FULL_ACCEPT = "full_accept"
    """Every proposed token was sampled: all rows are valid."""
    TAIL_REJECT = "tail_reject"
    """All but the last: one row is invalid, which the start of the next window trims."""
    EARLY_REJECT = "early_reject"
    """Rows after the first difference are invalid."""


@dataclass(frozen=True)
class Judgement:
    """Result of a window and its verdict."""

    committed: tuple[int, ...]
    """Ids that join the sequence, at least one; an end token is the last of them."""
    num_proposed: int
    """Proposed tokens in the window."""
    num_accepted: int
    """Those among them that were sampled and committed."""
    span: SpanClass
    """How much of the window was accepted."""
    has_stop: bool = False
    """Whether an end token was sampled within the window."""

    @property
    def is_rejected(self) -> bool:
        """Whether the stages hold rows of rejected tokens."""
        return self.span in {SpanClass.TAIL_REJECT, SpanClass.EARLY_REJECT}


class SpanKind(NamedTuple):
    """A span class, with or without a stop within the window."""

    span: SpanClass
    """How much of the window was accepted."""
    has_stop: bool
    """Whether an end token was sampled within it."""


@dataclass(frozen=True)
class SpeculationStatistics:
    """Counts over judged windows."""

    num_windows: int = 0
    """Judged windows, plain ones included."""
    num_drafts: int = 0
    """Windows with proposals."""
    num_committed: int = 0
    """Tokens committed by all of them."""
    proposed_per_position: tuple[int, ...] = ()
    """Entry `i`: windows that proposed more than `i` tokens."""
    accepted_per_position: tuple[int, ...] = ()
    """Entry `i`: windows that had more than `i` of them accepted."""
    reached_per_position: tuple[int, ...] = ()
    """Entry `i`: windows that proposed more than `i` tokens and had the first `i` accepted."""
    spans: Mapping[SpanKind, int] = field(default_factory=dict)
    """Windows of each kind."""

    @property
    def num_proposed(self) -> int:
        """Proposed tokens that were verified."""
        return sum(self.proposed_per_position)

    @property
    def num_accepted(self) -> int:
        """Proposed tokens that the target sampled as well."""
        return sum(self.accepted_per_position)

    @property
    def mean_accepted(self) -> float:
        """Accepted tokens per window with proposals; 0 without any."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0

    @property
    def mean_committed(self) -> float:
        """Tokens per window, plain ones included: the gain of a round trip; 0 without any."""
        return self.num_committed / self.num_windows if self.num_windows else 0.0

    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of windows that proposed a token at each position and had it accepted.

        Unconditional: a token behind a rejected one counts as not accepted.
        """
        return _shares(self.accepted_per_position, self.proposed_per_position)

    def conditional_acceptance_per_position(self) -> tuple[float, ...]:
        """Share of tokens at each position that were accepted, given that all before them were.

        Ends before the first position that no window reached.
        """
        return _shares(self.accepted_per_position, self.reached_per_position)

    @classmethod
    def of(cls, judgements: Sequence[Judgement]) -> SpeculationStatistics:
        """Counts over many windows."""
        drafts = [judgement for judgement in judgements if judgement.num_proposed]
        width = max((draft.num_proposed for draft in drafts), default=0)
        return cls(
            num_windows=len(judgements),
            num_drafts=len(drafts),
            num_committed=sum(len(judgement.committed) for judgement in judgements),
            proposed_per_position=_num_reaching([draft.num_proposed for draft in drafts], width),
            accepted_per_position=_num_reaching([draft.num_accepted for draft in drafts], width),
            reached_per_position=_num_reaching(
                [min(draft.num_accepted + 1, draft.num_proposed) for draft in drafts], width
            ),
            spans=Counter(SpanKind(judgement.span, judgement.has_stop) for judgement in judgements),
        )

    def add(self, judgement: Judgement) -> SpeculationStatistics:
        """These counts and one more window."""
        return self.merge(SpeculationStatistics.of((judgement,)))

    def merge(self, other: SpeculationStatistics) -> SpeculationStatistics:
        """Sums of both counts."""
        kinds = [*self.spans, *(kind for kind in other.spans if kind not in self.spans)]
        return SpeculationStatistics(
            num_windows=self.num_windows + other.num_windows,
            num_drafts=self.num_drafts + other.num_drafts,
            num_committed=self.num_committed + other.num_committed,
            proposed_per_position=_sum(self.proposed_per_position, other.proposed_per_position),
            accepted_per_position=_sum(self.accepted_per_position, other.accepted_per_position),
            reached_per_position=_sum(self.reached_per_position, other.reached_per_position),
            spans={kind: self.spans.get(kind, 0) + other.spans.get(kind, 0) for kind in kinds},
        )


@dataclass(frozen=True)
class DepthStatistics:
    """Counts of drafted tokens by their depth: the distance from the last feature that the drafter had.

    Entry `i` is of depth `i + 1`. A chain may be spread over several windows in flight.
    """

    proposed: tuple[int, ...] = ()
    """Tokens sent to be verified, those of void windows included."""
    reached: tuple[int, ...] = ()
    """Those among them before which all tokens were accepted."""
    accepted: tuple[int, ...] = ()
    """Those among them that were accepted."""

    @classmethod
    def of(cls, depths: Sequence[int], num_accepted: int | None) -> DepthStatistics:
        """Counts of one window.

        Args:
            depths: Depth of each proposed token, at least 1.
            num_accepted: How many of them were accepted; None if it was void before its verdict.
        """
        num_reached = 0 if num_accepted is None else num_accepted + 1
        return cls(
            _per_depth(depths),
            _per_depth(depths[:num_reached]),
            _per_depth(depths[: num_accepted or 0]),
        )

    def merge(self, other: DepthStatistics) -> DepthStatistics:
        """Sums of both counts."""
        return DepthStatistics(
            _sum(self.proposed, other.proposed),
            _sum(self.reached, other.reached),
            _sum(self.accepted, other.accepted),
        )

    def acceptance(self) -> tuple[float, ...]:
        """Share of tokens at each depth that were accepted, whatever went before: unconditional."""
        return _shares(self.accepted, self.proposed)

    def conditional_acceptance(self) -> tuple[float, ...]:
        """Share of tokens at each depth that were accepted, given that all before them were.

        Ends before the first depth that was never reached.
        """
        return _shares(self.accepted, self.reached)


class AcceptanceTable:
    """Acceptance rates by proposer and confidence, with exponential forgetting.

    Args:
        memory: Approximate number of judgements that a bucket remembers.
    """

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._accepted: dict[tuple[str, int, int], float] = {}
        self._judged: dict[tuple[str, int, int], float] = {}

    def add(self, proposer: str, confidence: float, depth: int = 0, *, is_accepted: bool) -> None:
        """Record the judgement of one token."""
        bucket = (proposer, bucket_of(confidence), depth_bucket_of(depth))
        self._accepted[bucket] = self._accepted.get(bucket, 0.0) * self._keep + is_accepted
        self._judged[bucket] = self._judged.get(bucket, 0.0) * self._keep + 1.0

    @property
    def proposers(self) -> set[str]:
        """Names of proposers with judgements."""
        return {name for name, *_ in self._judged}

    def mean(self, proposer: str) -> float | None:
        """Acceptance rate over all confidences; None without judgements."""
        judged = sum(count for (name, *_), count in self._judged.items() if name == proposer)
        accepted = sum(count for (name, *_), count in self._accepted.items() if name == proposer)
        return accepted / judged if judged else None

    def expected_mean(self, proposer: str, prior: float, prior_weight: float) -> float:
        """Acceptance rate over all confidences; near `prior` while there are few judgements."""
        judged = sum(count for (name, *_), count in self._judged.items() if name == proposer)
        accepted = sum(count for (name, *_), count in self._accepted.items() if name == proposer)
        return (accepted + prior * prior_weight) / (judged + prior_weight)

    def estimate(
        self, proposer: str, confidence: float, prior: float, prior_weight: float, depth: int = 0
    ) -> float:
        """Acceptance rate at this confidence and depth; near `prior` while there are few judgements."""
        bucket = (proposer, bucket_of(confidence), depth_bucket_of(depth))
        accepted, judged = self._accepted.get(bucket, 0.0), self._judged.get(bucket, 0.0)
        return (accepted + prior * prior_weight) / (judged + prior_weight)


class Calibration:
    """Calibrated confidences of one session.

    Its own judgements count most, then those of all sessions, then the proposer's confidence.

    Args:
        shared: Table of all sessions of a coordinator, updated as well.
    """

    _MEMORY: Final = 24.0
    # Number of a session's own judgements that weigh as much as those of all sessions.
    _SHARED_WEIGHT: Final = 4.0
    _WORD_WEIGHT: Final = 4.0

    def __init__(self, shared: AcceptanceTable) -> None:
        self._shared = shared
        self._own = AcceptanceTable(self._MEMORY)

    def acceptances(self, proposal: Proposal) -> tuple[float, ...]:
        """Acceptance probability of each token, given that those before it are accepted."""
        pairs = zip_longest(proposal.confidences, proposal.depths, fillvalue=0)
        return tuple(
            self.acceptance(proposal.proposer, confidence, int(depth)) for confidence, depth in pairs
        )

    def acceptance(self, proposer: str, confidence: float, depth: int = 0) -> float:
        """Acceptance probability of a token of this confidence, and of this depth if it has one."""
        word = min(max(confidence, 0.0), 1.0)
        prior = self._shared.estimate(proposer, word, word, self._WORD_WEIGHT, depth)
        return self._own.estimate(proposer, word, prior, self._SHARED_WEIGHT, depth)

    def best_mean(self, counts: Callable[[str], bool]) -> float:
        """Highest acceptance rate of a proposer in this session; 0 without judgements.

        Args:
            counts: Whether the proposer of a name counts.
        """
        return max((self._own.mean(name) or 0.0 for name in self._own.proposers if counts(name)), default=0.0)

    def expected_mean(self, proposer: str) -> float:
        """Acceptance rate to be expected of the proposer, whatever its confidence."""
        shared = self._shared.expected_mean(proposer, _EVEN, self._WORD_WEIGHT)
        return self._own.expected_mean(proposer, shared, self._SHARED_WEIGHT)

    def judged(self, proposal: Proposal, num_accepted: int) -> None:
        """Record the judgement of a window, up to the first rejected token."""
        judged = proposal.first(num_accepted + 1)
        pairs = zip_longest(judged.confidences, judged.depths, fillvalue=0)
        for index, (confidence, depth) in enumerate(pairs):
            word = min(max(confidence, 0.0), 1.0)
            for table in (self._own, self._shared):
                table.add(proposal.proposer, word, int(depth), is_accepted=index < num_accepted)


@dataclass(frozen=True)
class ProposalContext:
    """State of a session when a window could be sent."""

    now_ms: float
    """Monotonic clock, milliseconds."""
    num_in_flight: int
    """Windows of this session in flight."""
    position: int
    """Number of prompt and committed tokens."""
    room: int
    """Most proposed tokens within context, requested tokens and rows of a batch."""
    num_sessions: int
    """Running sessions, this one included."""


@dataclass(frozen=True)
class Decision:
    """Number of proposed tokens to send."""

    width: int
    """Proposed tokens to send now. 0 sends a plain window if none is in flight, otherwise none."""
    reason: str
    """Reason, for logs and `timings`."""


@dataclass(frozen=True)
class StageMeasure:
    """Times of one stage for a window."""

    num_rows: int
    """Rows of its batch."""
    queue_ms: float
    """Waiting before the batch."""
    compute_ms: float
    """Computing of the whole batch."""


@dataclass(frozen=True)
class WindowOutcome:
    """A judged window."""

    judgement: Judgement
    """Its judgement."""
    proposal: Proposal
    """Its proposed tokens: all of them, if windows were in flight ahead of it."""
    position: int
    """Position of its first token."""
    sent_ms: float
    """When it was sent."""
    arrived_ms: float
    """When its verdict came."""
    num_in_flight: int
    """Windows of the session in flight when it was sent."""
    stages: tuple[StageMeasure, ...]
    """Times of each stage, in pipeline order; empty if there are none."""
    num_stale: int
    """Windows behind it that its verdict voided."""
    num_behind: int
    """Windows behind it that remain in flight."""
    num_recomputed: int = 0
    """Its first rows, which were computed before: a model with recurrent layers went back."""


def judge(
    proposed: Sequence[int],
    sampled: Sequence[int],
    *,
    num_confirmed: int = 0,
    end_tokens: Collection[int] = (),
    max_committed: int | None = None,
) -> Judgement:
    """Match a verdict with the proposal of its window.

    With 7 8 9 proposed: `[7, 8, 9, 4]` is a full accept and a free prediction, `[7, 8, 5]` a tail reject and
    `[6]` an early one.

    Args:
        proposed: Proposed tokens of the window, in order; empty for a plain window.
        sampled: Token ids of the verdict.
        num_confirmed: Tokens before those that were proposed too and are committed already: the first of a
            window behind another one, whose free prediction it was.
        end_tokens: Ids that end the sequence.
        max_committed: Most ids that may still be committed; None for no limit.

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
    """Judgement of a window whose first token differs from the free prediction before it.

    Args:
        num_proposed: Number of its tokens, all proposed.
    """
    return Judgement((), num_proposed, 0, _span_class(num_proposed, 0))


def _span_class(num_proposed: int, num_matched: int) -> SpanClass:
    if num_proposed == 0:
        return SpanClass.PLAIN
    if num_matched == num_proposed:
        return SpanClass.FULL_ACCEPT
    return SpanClass.TAIL_REJECT if num_matched == num_proposed - 1 else SpanClass.EARLY_REJECT


def _per_depth(depths: Sequence[int]) -> tuple[int, ...]:
    counts = Counter(depths)
    return tuple(counts[depth] for depth in range(1, max(depths, default=0) + 1))


def _shares(parts: Sequence[int], wholes: Sequence[int]) -> tuple[float, ...]:
    """`part / whole` of each pair, up to the first whole of 0; missing parts are 0."""
    shares = []
    for part, whole in zip_longest(parts, wholes, fillvalue=0):
        if not whole:
            break
        shares.append(part / whole)
    return tuple(shares)


def _num_reaching(lengths: Sequence[int], width: int) -> tuple[int, ...]:
    """Number of `lengths` that exceed each of 0, 1, … `width` - 1."""
    ends = Counter(lengths)
    left, survivors = len(lengths), []
    for position in range(width):
        left -= ends[position]
        survivors.append(left)
    return tuple(survivors)


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))


def depth_bucket_of(depth: int) -> int:
    """Index of the bucket of a depth: 0 for none, then 1, 2 to 3, 4 to 8, and more."""
    if depth > _DEEP:
        return 4
    return 0 if depth <= 0 else min(depth.bit_length(), 3)


def bucket_of(confidence: float) -> int:
    """Index of the bucket of a confidence in [0, 1]."""
    return min(int(confidence * NUM_BUCKETS), NUM_BUCKETS - 1)
