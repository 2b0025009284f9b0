"""Engine protocol: generation requests to committed tokens, with statistics and speculation report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mesh.status import FeatureStatus, ProposerStatus, SpeculationStatus, WindowTimes, as_json
from spanmesh_proto.image_chunk import begin_of_chunk
from spanmesh_proto.row_ids import has_rows
from speculative.acceptance import DepthStatistics, SpeculationStatistics
from stages.sampling.sampler import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from spanmesh_proto import windows_pb2 as wire
    from spanmesh_proto.image_chunk import ImageChunk
    from stages.sampling.sampler import TokenLogprobs


SpeculationMode = Literal["off", "ngram", "draft", "auto", "replay"]


@dataclass(frozen=True)
class SpeculationLimits:
    """Limits of speculation for one request; they cannot exceed the server's."""

    mode: SpeculationMode | None = None
    """Proposers that are allowed, or None for the server's."""
    max_width: int | None = None
    """Most proposed tokens in one window, or None for the server's bound."""
    depth: int | None = None
    """Most windows in flight, or None for the server's bound."""


@dataclass(frozen=True)
class PrefillProgress:
    """Progress of reading a prompt."""

    num_tokens: int
    """Tokens of the prompt."""
    num_cached: int
    """First tokens that the stages already held."""
    num_read: int
    """First tokens that every stage has computed by now, or held."""

    @property
    def is_whole(self) -> bool:
        """Whether the whole prompt was read."""
        return self.num_read >= self.num_tokens


@dataclass(frozen=True)
class RecordedPrompt:
    """How the answer to a prompt is filed where answers are recorded."""

    api: Literal["chat", "raw"]
    """Whether a chat template wrote the prompt."""
    id: str
    """Name of the prompt, which all turns of a chat share: what learns from some is tried on others."""


@dataclass(frozen=True)
class RowInput:
    """Rows of a prompt that are no tokens: a chunk of an image."""

    chunk: ImageChunk
    """Where they are in the prompt, and how they are computed."""
    load: Callable[[], Awaitable[NDArray[np.float32]]] = field(compare=False, repr=False)
    """Returns the rows, float32 (rows, width of the model's input), always the same bits. Called when they
    are about to be sent, so never for rows that are cached, and again after the loss of a stage. A
    `MeshError` that it raises ends the answer."""
    is_carried: Callable[[], bool] = field(default=lambda: False, compare=False, repr=False)
    """Whether rows that were loaded are not quite those that their ids name, since something else computed
    them; then what is computed from them is not kept under these ids."""


@dataclass(frozen=True)
class GenerationRequest:
    """A sequence to continue."""

    prompt: tuple[int, ...]
    """Token ids, at least one; for rows of `inputs` theirs, see `spanmesh_proto.row_ids`."""
    max_tokens: int
    """Stop after this many, with finish reason `length`."""
    end_tokens: frozenset[int] = frozenset()
    """Stop after committing one of these, with finish reason `stop`; empty ignores them."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters."""
    speculation: SpeculationLimits = field(default_factory=SpeculationLimits)
    """Limits of speculation."""
    prediction: tuple[int, ...] = ()
    """Predicted output of the client, as token ids; used by proposers only."""
    client: str | None = None
    """Client of the request, for fair turns where slots are short. None where the API is open."""
    history_key: str | None = None
    """Client whose earlier answers may be proposed; None for none."""
    uses_cache: bool = True
    """Whether it may begin with a cached prefix of earlier requests of the same client."""
    num_top_logprobs: int | None = None
    """Number of likeliest tokens to report with each committed one, up to
    `stages.sampling.sampler.MAX_TOP_LOGPROBS`; None reports no log probabilities."""
    grammar: str | None = None
    """GBNF that the answer must match, from its first token on; None leaves it free."""
    scores_prompt: bool = False
    """Whether log probabilities of the prompt's tokens are reported, too: needs `num_top_logprobs`, and
    nothing of the prompt may be cached."""
    recording: RecordedPrompt | None = None
    """How the answer is filed if answers are recorded; None for one that must not be."""
    inputs: tuple[RowInput, ...] = ()
    """Rows of the prompt that are no tokens, in order."""
    on_prefill: Callable[[PrefillProgress], None] | None = field(default=None, compare=False, repr=False)
    """Called in the event loop whenever more of the prompt was read; None for no calls."""

    @property
    def chunks(self) -> tuple[ImageChunk, ...]:
        """Places of the prompt's rows that are no tokens, in order."""
        return tuple(each.chunk for each in self.inputs)

    def begin_of_input(self, num: int) -> int:
        """The number of first rows itself, or that of those before the input that it divides."""
        return begin_of_chunk(self.chunks, num)

    @property
    def has_rows(self) -> bool:
        """Whether the prompt has rows that are no tokens, see `spanmesh_proto.row_ids`."""
        return has_rows(self.prompt)


@dataclass(frozen=True)
class GenerationStats:
    """Counts and times of one request so far."""

    num_cached: int = 0
    """Tokens of the prompt that the stages already held."""
    num_windows: int = 0
    """Windows judged, prefill chunks left out."""
    num_proposed: int = 0
    """Proposed tokens that were verified."""
    num_accepted: int = 0
    """Proposed tokens that the target sampled as well."""
    num_replays: int = 0
    """Number of replays, after the loss or move of a stage."""
    prefill_ms: float = 0.0
    """From the first window sent to the first token."""
    decode_ms: float = 0.0
    """From the first token to the latest."""
    report: Callable[[], SpeculationReport] | None = field(default=None, compare=False, repr=False)
    """Speculation so far; None without proposers."""
    ring: Callable[[], RingTimes] | None = field(default=None, compare=False, repr=False)
    """Times by place in the ring so far; None without stages."""


@dataclass(frozen=True)
class Committed:
    """Tokens that were committed together."""

    tokens: tuple[int, ...]
    """One or more ids; an end token is the last of them."""
    finish: Literal["stop", "length"] | None
    """Reason why the answer ended, or None."""
    stats: GenerationStats
    """Counts and times up to here."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each token if requested, else empty."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first tokens, one entry for each token of the prompt but the first if requested, else empty.
    """


class Engine(Protocol):
    """The coordinator, or another source of tokens."""

    @property
    def context_length(self) -> int:
        """Positions that one session may use, prompt and answer together."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """Continue the prompt. Closing the generator frees the session at every stage.

        Raises:
            ContextLengthExceeded: If prompt + 1 exceeds the context.
            Overloaded: If the waiting queue is full.
            StageFailed: If a stage failed or was lost.
        """


@dataclass
class StageTotals:
    """Times of one stage, summed over windows."""

    num_windows: int = 0
    """Windows that it computed, not those it only passed on."""
    compute_us: int = 0
    """Computing; at the tail sampling and verifying as well."""
    queue_us: int = 0
    """Waiting of windows for it."""

    @property
    def compute_ms(self) -> float:
        """Computing, milliseconds."""
        return self.compute_us / 1000

    @property
    def queue_ms(self) -> float:
        """Waiting of windows for it, milliseconds."""
        return self.queue_us / 1000

    def add(self, time: wire.StageTime) -> None:
        """Add the times of a window."""
        self.num_windows += bool(time.num_rows)
        self.compute_us += time.compute_us
        self.queue_us += time.queue_us


@dataclass(frozen=True)
class RingTimes:
    """Times of one answer's windows, without prefill chunks.

    Several windows may be in flight at once: then the sums exceed the elapsed time.
    """

    stages: tuple[StageTotals, ...] = ()
    """In pipeline order."""
    wire_ms: float = 0.0
    """Part of the round trips beyond the stages' times: network and message handling. Clocks of hosts differ,
    so it is known of the whole round only."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable: part of `timings`. A round has one hop more than there are stages."""
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
class FeatureCounts:
    """Features of one or more answers: hidden states of the target that a drafter or a recording reads."""

    num_wanted: int = 0
    """Rows whose features were asked for and whose tokens count."""
    num_received: int = 0
    """Those among them whose features arrived."""
    num_bytes: int = 0
    """Size of all features that arrived, of rejected tokens as well."""

    def merge(self, other: FeatureCounts) -> FeatureCounts:
        """Sums of both."""
        return FeatureCounts(
            self.num_wanted + other.num_wanted,
            self.num_received + other.num_received,
            self.num_bytes + other.num_bytes,
        )

    def status(self) -> FeatureStatus:
        """For the status."""
        return FeatureStatus(
            wanted=self.num_wanted,
            received=self.num_received,
            missing=self.num_wanted - self.num_received,
            bytes=self.num_bytes,
        )


@dataclass(frozen=True)
class SpeculationReport:
    """Speculation over judged windows, without prefill chunks."""

    by_proposer: Mapping[str, SpeculationStatistics] = field(default_factory=dict)
    """Judged windows by proposer; plain windows under the empty name."""
    by_depth: Mapping[str, DepthStatistics] = field(default_factory=dict)
    """Tokens by depth, of the proposers that read features."""
    features: FeatureCounts | None = None
    """Features that were asked for; None if neither a drafter reads them nor a recording."""
    num_voided_windows: int = 0
    """Windows void before their verdict, because one ahead of them was rejected."""
    num_voided_rows: int = 0
    """Rows that they carried."""
    num_wasted_rows: int = 0
    """Those of them that all stages computed."""
    num_recomputed_rows: int = 0
    """Rows of accepted tokens that were computed again by models with recurrent layers."""
    num_cancels: int = 0
    """Number of cancel messages."""
    round_trip_ms: float = 0.0
    """From sending a window to its verdict, summed over windows; they overlap."""
    queue_ms: float = 0.0
    """Part of it waiting at stages."""
    compute_ms: float = 0.0
    """Part of it computing, sampling and verifying included."""
    draft_ms_per_token: float | None = None
    """Time of the draft model per token; None without one."""
    draft_tokens_per_pass: float | None = None
    """Tokens that it drafts at once, in the mean: 1, or those of a block; None without one."""
    controller: Mapping[str, Any] = field(default_factory=dict)
    """State of the controller, with its reasons."""

    @property
    def network_ms(self) -> float:
        """Part of the round trips beyond the stages' times."""
        return max(0.0, self.round_trip_ms - self.queue_ms - self.compute_ms)

    @property
    def total(self) -> SpeculationStatistics:
        """Sum over all proposers, plain windows included."""
        total = SpeculationStatistics()
        for statistics in self.by_proposer.values():
            total = total.merge(statistics)
        return total

    def merge(self, other: SpeculationReport) -> SpeculationReport:
        """Sums of both; the controller's state is the other's."""
        nothing, no_depth = SpeculationStatistics(), DepthStatistics()
        features = self.features
        if other.features is not None:
            features = other.features.merge(features or FeatureCounts())
        return SpeculationReport(
            by_proposer={
                name: self.by_proposer.get(name, nothing).merge(other.by_proposer.get(name, nothing))
                for name in {**self.by_proposer, **other.by_proposer}
            },
            by_depth={
                name: self.by_depth.get(name, no_depth).merge(other.by_depth.get(name, no_depth))
                for name in {**self.by_depth, **other.by_depth}
            },
            features=features,
            num_voided_windows=self.num_voided_windows + other.num_voided_windows,
            num_voided_rows=self.num_voided_rows + other.num_voided_rows,
            num_wasted_rows=self.num_wasted_rows + other.num_wasted_rows,
            num_recomputed_rows=self.num_recomputed_rows + other.num_recomputed_rows,
            num_cancels=self.num_cancels + other.num_cancels,
            round_trip_ms=self.round_trip_ms + other.round_trip_ms,
            queue_ms=self.queue_ms + other.queue_ms,
            compute_ms=self.compute_ms + other.compute_ms,
            draft_ms_per_token=other.draft_ms_per_token or self.draft_ms_per_token,
            draft_tokens_per_pass=other.draft_tokens_per_pass or self.draft_tokens_per_pass,
            controller=other.controller or self.controller,
        )

    def status(self) -> SpeculationStatus:
        """For the status."""
        total = self.total
        return SpeculationStatus(
            **self.controller,
            windows=total.num_windows,
            proposed=total.num_proposed,
            accepted=total.num_accepted,
            tokens_per_window=round(total.mean_committed, 3),
            acceptance_per_position=_rounded(total.acceptance_per_position()),
            conditional_acceptance_per_position=_rounded(total.conditional_acceptance_per_position()),
            proposers={
                name: _proposer_status(statistics, self.by_depth.get(name))
                for name, statistics in self.by_proposer.items()
                if name
            },
            features=None if self.features is None else self.features.status(),
            stale_windows=self.num_voided_windows,
            stale_rows=self.num_voided_rows,
            stale_rows_computed=self.num_wasted_rows,
            recomputed_rows=self.num_recomputed_rows,
            cancels=self.num_cancels,
            mean_window_ms=self._mean_window_ms(max(total.num_windows, 1)),
            draft_ms_per_token=_rounded_or_none(self.draft_ms_per_token),
            draft_tokens_per_pass=_rounded_or_none(self.draft_tokens_per_pass),
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable: `timings.speculation` of an answer."""
        found: dict[str, Any] = as_json(self.status())
        if found["features"] is not None:
            # Of the mesh, not of an answer.
            del found["features"]["off"]
        return found

    def _mean_window_ms(self, num_windows: int) -> WindowTimes:
        return WindowTimes(
            round_trip=round(self.round_trip_ms / num_windows, 3),
            verify=round(self.compute_ms / num_windows, 3),
            queue=round(self.queue_ms / num_windows, 3),
            network=round(self.network_ms / num_windows, 3),
        )


def _proposer_status(statistics: SpeculationStatistics, depths: DepthStatistics | None) -> ProposerStatus:
    """Counts of a proposer.

    Args:
        statistics: Of its windows.
        depths: Tokens by depth; None for proposers that read no features.
    """
    found = ProposerStatus(
        drafts=statistics.num_drafts,
        drafted=statistics.num_proposed,
        accepted=statistics.num_accepted,
        mean_accepted=round(statistics.mean_accepted, 3),
        drafted_per_position=statistics.proposed_per_position,
        accepted_per_position=statistics.accepted_per_position,
        reached_per_position=statistics.reached_per_position,
        spans={
            kind.span + ("_with_stop" if kind.has_stop else ""): count
            for kind, count in statistics.spans.items()
        },
    )
    if depths is not None:
        found.drafted_per_depth = depths.proposed
        found.reached_per_depth = depths.reached
        found.accepted_per_depth = depths.accepted
        found.acceptance_per_depth = _rounded(depths.acceptance())
        found.conditional_acceptance_per_depth = _rounded(depths.conditional_acceptance())
    return found


def _rounded(shares: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(round(share, 3) for share in shares)


def _rounded_or_none(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
