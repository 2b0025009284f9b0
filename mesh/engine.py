"""Engine protocol: generation requests to committed tokens, with statistics and speculation report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from speculative.acceptance import SpeculationStatistics
from stages.sampling.sampler import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from stages.sampling.logprobs import TokenLogprobs


SpeculationMode = Literal["off", "ngram", "draft", "auto", "replay"]


@dataclass(frozen=True)
class SpeculationLimits:
    """How far one request may speculate: it narrows what the server was started with and never widens it.

    Attributes:
        mode: Who may propose, or None for whoever the server lets.
        max_width: Most proposed tokens in one window, or None for the server's bound.
        depth: Most windows in flight, or None for the server's bound.
    """

    mode: SpeculationMode | None = None
    max_width: int | None = None
    depth: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to continue.

    Attributes:
        prompt: Token ids, at least one.
        max_tokens: Stop after this many, with finish reason `length`.
        end_tokens: Stop after committing one of these, with finish reason `stop`; empty ignores them.
        sampling: How the tail draws.
        speculation: How far this request may speculate.
        prediction: What the client expects the answer to be, as token ids; it feeds proposers only.
        client: Whose request it is; where slots are short, clients take turns. None where nobody is told
            apart.
        history_key: Whose earlier answers may feed proposers; None for nobody's.
        uses_cache: Whether it may begin with tokens that earlier requests of the same client have left in
            the stages' caches.
        num_top_logprobs: How many likeliest tokens to report beside each committed one's logprob, up to
            `stages.sampling.logprobs.MAX_TOP_LOGPROBS`; None reports nothing.
        grammar: GBNF that the answer must match, from its first token on; None leaves it free.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    end_tokens: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationLimits = field(default_factory=SpeculationLimits)
    prediction: tuple[int, ...] = ()
    client: str | None = None
    history_key: str | None = None
    uses_cache: bool = True
    num_top_logprobs: int | None = None
    grammar: str | None = None


@dataclass(frozen=True)
class GenerationStats:
    """Counts and times of one request so far.

    Attributes:
        num_cached: Tokens of the prompt that the stages held already.
        num_windows: Windows judged, prefill chunks left out.
        num_proposed: Proposed tokens that were verified.
        num_accepted: Proposed tokens that the target chose too.
        num_replays: How often it began again, as a stage was lost or its layers moved.
        prefill_ms: From the first window sent to the first token.
        decode_ms: From the first token to the latest.
        report: What speculation did, up to the moment of the call; None where nothing could be proposed.
        ring: Where the time went, up to the moment of the call; None where there are no stages.
    """

    num_cached: int = 0
    num_windows: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_replays: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    report: Callable[[], SpeculationReport] | None = field(default=None, compare=False, repr=False)
    ring: Callable[[], RingTimes] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Committed:
    """Tokens that became part of the answer together.

    Attributes:
        tokens: One or more ids; an end token, if it came, is the last of them.
        finish: Why the answer is over, or None while it goes on.
        stats: Counts and times up to here.
        logprobs: One entry for each token if the request asked for that, else none.
    """

    tokens: tuple[int, ...]
    finish: Literal["stop", "length"] | None
    stats: GenerationStats
    logprobs: tuple[TokenLogprobs, ...] = ()


class Engine(Protocol):
    """The coordinator, or anything that can stand in for it."""

    @property
    def context_length(self) -> int:
        """Positions that one session may use, prompt and answer together."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """Continue the prompt. Closing the generator frees the session at every stage.

        Raises:
            ContextLengthExceeded: If prompt + 1 exceeds the context.
            Overloaded: If the waiting line has no place for it.
            StageFailed: If a stage failed or went away.
        """


@dataclass(frozen=True)
class StageTimes:
    """What one stage took, summed over windows.

    Attributes:
        num_windows: That it computed; what it only sent on again is left out.
        compute_ms: Computing; drawing and verifying too, where it is the tail.
        queue_ms: Windows waiting for it.
    """

    num_windows: int = 0
    compute_ms: float = 0.0
    queue_ms: float = 0.0


@dataclass(frozen=True)
class RingTimes:
    """One answer's windows, chunks of its prompt left out.

    Several windows may be under way at once: then the sums exceed the time that passed.

    Attributes:
        stages: In the order of the pipeline.
        wire_ms: The part of the windows' round trips that no stage accounts for: network, and what passes
            messages on at its ends. Clocks of hosts differ, so it is known of the whole round only.
    """

    stages: tuple[StageTimes, ...] = ()
    wire_ms: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON: part of `timings`. A round has one hop more than there are stages."""
        hops = len(self.stages) + 1
        num_windows = max((stage.num_windows for stage in self.stages), default=0)
        return {
            "stages": [
                {
                    "windows": stage.num_windows,
                    "compute_ms": round(stage.compute_ms, 3),
                    "queue_ms": round(stage.queue_ms, 3),
                }
                for stage in self.stages
            ],
            "wire_ms": round(self.wire_ms, 3),
            "wire_ms_per_hop": round(self.wire_ms / hops / num_windows, 3) if num_windows else 0.0,
        }


@dataclass(frozen=True)
class SpeculationReport:
    """Counts and times over judged windows; prefill chunks are left out.

    Attributes:
        by_proposer: Windows judged, by who proposed what they carried; plain windows under the empty name.
        num_voided_windows: Windows void before their verdict, because one ahead of them was rejected.
        num_voided_rows: Rows that they carried.
        num_wasted_rows: Those of them that all stages computed all the same.
        num_cancels: Times that the stages were told of void windows.
        round_trip_ms: From sending a window to its verdict, summed over windows; they overlap.
        queue_ms: The part of it that windows waited at stages.
        compute_ms: The part of it that stages computed: drawing and verifying included.
        draft_ms_per_token: What a token costs the draft model; None without one.
        controller: What the controller does, and why.
    """

    by_proposer: Mapping[str, SpeculationStatistics] = field(default_factory=dict)
    num_voided_windows: int = 0
    num_voided_rows: int = 0
    num_wasted_rows: int = 0
    num_cancels: int = 0
    round_trip_ms: float = 0.0
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    draft_ms_per_token: float | None = None
    controller: Mapping[str, Any] = field(default_factory=dict)

    @property
    def network_ms(self) -> float:
        """The part of the round trips that no stage accounts for."""
        return max(0.0, self.round_trip_ms - self.queue_ms - self.compute_ms)

    @property
    def total(self) -> SpeculationStatistics:
        """Over all proposers, plain windows too."""
        total = SpeculationStatistics()
        for statistics in self.by_proposer.values():
            total = total.merge(statistics)
        return total

    def merge(self, other: SpeculationReport) -> SpeculationReport:
        """The counts and times of both; what the controller says is the other's."""
        names = [*self.by_proposer, *(name for name in other.by_proposer if name not in self.by_proposer)]
        nothing = SpeculationStatistics()
        return SpeculationReport(
            by_proposer={
                name: self.by_proposer.get(name, nothing).merge(other.by_proposer.get(name, nothing))
                for name in names
            },
            num_voided_windows=self.num_voided_windows + other.num_voided_windows,
            num_voided_rows=self.num_voided_rows + other.num_voided_rows,
            num_wasted_rows=self.num_wasted_rows + other.num_wasted_rows,
            num_cancels=self.num_cancels + other.num_cancels,
            round_trip_ms=self.round_trip_ms + other.round_trip_ms,
            queue_ms=self.queue_ms + other.queue_ms,
            compute_ms=self.compute_ms + other.compute_ms,
            draft_ms_per_token=other.draft_ms_per_token or self.draft_ms_per_token,
            controller=other.controller or self.controller,
        )

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON: `timings.speculation` of an answer, `speculation` of `/mesh/status`."""
        total = self.total
        return {
            **self.controller,
            "windows": total.num_windows,
            "proposed": total.num_proposed,
            "accepted": total.num_accepted,
            "tokens_per_window": round(total.mean_committed, 3),
            "acceptance_per_position": _rounded(total.acceptance_per_position()),
            "proposers": {
                name: _proposer_as_dict(statistics) for name, statistics in self.by_proposer.items() if name
            },
            "stale_windows": self.num_voided_windows,
            "stale_rows": self.num_voided_rows,
            "stale_rows_computed": self.num_wasted_rows,
            "cancels": self.num_cancels,
            "mean_window_ms": self._mean_window_ms(total.num_windows),
            "draft_ms_per_token": _rounded_or_none(self.draft_ms_per_token),
        }

    def _mean_window_ms(self, num_windows: int) -> dict[str, float]:
        times = {
            "round_trip": self.round_trip_ms,
            "verify": self.compute_ms,
            "queue": self.queue_ms,
            "network": self.network_ms,
        }
        return {name: round(total / max(num_windows, 1), 3) for name, total in times.items()}


def _proposer_as_dict(statistics: SpeculationStatistics) -> dict[str, Any]:
    return {
        "drafts": statistics.num_drafts,
        "drafted": statistics.num_proposed,
        "accepted": statistics.num_accepted,
        "mean_accepted": round(statistics.mean_accepted, 3),
        "drafted_per_position": list(statistics.proposed_per_position),
        "accepted_per_position": list(statistics.accepted_per_position),
        "spans": {
            kind.span + ("_with_stop" if kind.has_stop else ""): count
            for kind, count in statistics.spans.items()
        },
    }


def _rounded(shares: tuple[float, ...]) -> list[float]:
    return [round(share, 3) for share in shares]


def _rounded_or_none(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
