"""Results of `mesh bench spec`: samples, pairs and rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mesh.engine import FeatureCounts
from meshbench.speculation_workloads import is_degenerate
from speculative.acceptance import DepthStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mesh.engine import SpeculationMode
    from meshbench.load_client.answers import AnswerRecord
    from meshbench.under_test.links import KnownLinks

MESH: Final = "mesh"
LLAMA_RPC: Final = "llama.cpp RPC"
# Server whose replayed answers have wrong tokens among them, and beginning of the names of settings that send
# these one window at a time.
WITH_RATES: Final = "replay of given acceptance"
IN_STEP: Final = "in step"
_MODES: Final = ("off", "ngram", "draft", "auto", "replay")


@dataclass(frozen=True)
class DraftCounts:
    """Statistics of proposed tokens."""

    num_windows: int = 0
    """Passes through the target, those without proposed tokens too; 0 where the server does not say."""
    num_drafts: int = 0
    """Passes with proposed tokens; 0 if the server does not report them."""
    num_drafted: int = 0
    """Proposed tokens."""
    num_accepted: int = 0
    """Those that the target chose too."""
    drafted_per_position: tuple[int, ...] = ()
    """Entry `i`: passes that carried more than `i` proposed tokens."""
    accepted_per_position: tuple[int, ...] = ()
    """Entry `i`: passes that had more than `i` of them accepted."""
    num_stale_rows: int = 0
    """Rows that were void before their verdict."""
    reason: str = ""
    """Reason of the controller."""
    by_depth: DepthStatistics = field(default_factory=DepthStatistics)
    """Tokens by distance from the drafter's last feature, of drafters that read features."""
    features: FeatureCounts | None = None
    """Features that the drafter wanted and got; None without such a drafter."""
    draft_tokens_per_pass: float | None = None
    """Tokens that the drafter drafts at once, in the mean; None without one."""
    draft_ms_per_token: float | None = None
    """Time of a drafted token; None likewise."""

    @classmethod
    def from_timings(cls, timings: Mapping[str, Any]) -> DraftCounts:
        """From the `timings` of an answer: ours or llama-server's, which is less."""
        ours = timings.get("speculation") or {}
        proposers = (ours.get("proposers") or {}).values()
        return cls(
            num_windows=ours.get("windows", 0),
            num_drafts=sum(proposer["drafts"] for proposer in proposers),
            num_drafted=timings.get("draft_n", 0),
            num_accepted=timings.get("draft_n_accepted", 0),
            drafted_per_position=add_up(proposer["drafted_per_position"] for proposer in proposers),
            accepted_per_position=add_up(proposer["accepted_per_position"] for proposer in proposers),
            num_stale_rows=ours.get("stale_rows", 0),
            reason=str(ours.get("reason", "")),
            by_depth=DepthStatistics(
                *(
                    add_up(proposer.get(f"{what}_per_depth", ()) for proposer in proposers)
                    for what in ("drafted", "reached", "accepted")
                )
            ),
            features=None
            if (found := ours.get("features")) is None
            else FeatureCounts(found["wanted"], found["received"], found["bytes"]),
            draft_tokens_per_pass=ours.get("draft_tokens_per_pass"),
            draft_ms_per_token=ours.get("draft_ms_per_token"),
        )


@dataclass(frozen=True)
class Sample:
    """An answer and where it belongs."""

    turn: int
    """Samples of one turn are the same question under several settings, one right after the other."""
    system: str
    """The system that answered."""
    server: str
    """How the server was started, by a name."""
    setting: str
    """Name of the setting."""
    workload: str
    """Name of the workload."""
    question: str
    """Id of the question."""
    delay_ms: float
    """Requested one-way delay."""
    is_raw: bool
    """Whether it came from the completion endpoint."""
    is_warm: bool
    """Whether the question had been answered before."""
    temperature: float
    """Of sampling; 0 is greedy."""
    text: str
    """The answer."""
    num_tokens: int
    """Its length."""
    arrivals_ms: tuple[float, ...]
    """Arrival of each part, from the request."""
    counts: DraftCounts = field(default_factory=DraftCounts)
    """What became of proposed tokens."""

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return self.arrivals_ms[0]

    @property
    def tokens_per_s(self) -> float:
        """Decode rate, the first token left out; infinite if all came at once."""
        decode_ms = self.arrivals_ms[-1] - self.arrivals_ms[0]
        return (self.num_tokens - 1) / decode_ms * 1e3 if decode_ms > 0 else float("inf")

    @property
    def gaps_ms(self) -> tuple[float, ...]:
        """From each part's arrival to the next: inter-token latency as a reader sees it."""
        return tuple(
            later - earlier for earlier, later in zip(self.arrivals_ms, self.arrivals_ms[1:], strict=False)
        )

    @classmethod
    def of(cls, answer: AnswerRecord, **where: Any) -> Sample:
        """From a client's answer."""
        return cls(
            text=answer.text,
            num_tokens=answer.num_tokens,
            arrivals_ms=answer.arrivals_ms,
            counts=DraftCounts.from_timings(answer.timings),
            **where,
        )


@dataclass(frozen=True)
class RunConditions:
    """Conditions of a figure besides the compared ones."""

    command: str
    """The command line."""
    model: str
    """File name."""
    draft_model: str | None
    """File name, if there is one that is known."""
    num_stages: int
    """Hosts that hold layers; one more is the head."""
    num_threads: int | None
    """Of each stage; None if it is not known."""
    num_tokens: int
    """Of each answer."""
    numeric_mode: str
    """`fast` or `exact`."""
    seed: int
    """Of random prompts and of sampling."""
    processor: str
    """Name of the processor, of a mesh behind a URL that of its client."""
    num_cores: int
    """Of the machine, shared by all hosts of the lab."""
    software: str
    """Version of ours, and of llama-cpp-python."""
    url: str | None = None
    """Where the mesh is; None in the lab."""
    placement: tuple[str, ...] = ()
    """Host and layers of each stage of a mesh behind a URL."""
    other_draft: str | None = None
    """File name of the drafter that the draft model is compared with, if there is one."""


@dataclass
class Results:
    """Results of a run, filled in as it proceeds."""

    conditions: RunConditions
    """What the figures depend on."""
    samples: list[Sample] = field(default_factory=list)
    """In the order measured."""
    groups: list[ConcurrentRequests] = field(default_factory=list)
    """In the order measured."""
    servers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Options of `mesh serve`, by the name of each way to start it."""
    hops_ms: dict[float, float] = field(default_factory=dict)
    """Measured one-way delays, by the requested one."""
    failures: list[str] = field(default_factory=list)
    """What could not be measured, and why."""
    peer_rates: dict[str, float | str] = field(default_factory=dict)
    """By setting of llama.cpp RPC, its tokens per second when the best was chosen, or why it has none."""
    peer_delay_ms: float | None = None
    """One-way delay of that choice."""
    took_s: float = 0.0
    """The whole run."""
    links: KnownLinks | None = None
    """Links between the hosts as the head measured them; None in the lab."""
    omitted: list[str] = field(default_factory=list)
    """What cannot be measured of such a mesh, which is no failure."""

    def is_exact(self, server: str) -> bool:
        """Whether a server computed in exact mode."""
        return "--exact" in self.servers.get(server, ())


@dataclass(frozen=True)
class ConcurrentRequests:
    """The same requests at once, under `off` and under a setting, one right after the other."""

    num_at_once: int
    """Requests under way together."""
    delay_ms: float
    """One way."""
    setting: str
    """Name of the setting."""
    off_tokens_per_s: float
    """All tokens of all answers, by the time from the first request to the end of the last answer."""
    tokens_per_s: float
    """The same under the setting."""
    num_forks: int
    """Number of answers with different texts."""

    @property
    def ratio(self) -> float:
        """Ratio of tokens per second to those under `off`."""
        return self.tokens_per_s / self.off_tokens_per_s


@dataclass(frozen=True)
class Setting:
    """Speculation setting of a request."""

    mode: SpeculationMode
    """Allowed proposers."""
    max_width: int | None = None
    """Most proposed tokens in one window (`--draft-max`), or None for the server's bound."""
    depth: int | None = None
    """Most windows in flight, or None for the server's bound."""
    label: str | None = None
    """What tables call it, or None for a name made of the limits."""

    @property
    def name(self) -> str:
        """Short, for tables: `auto`, `draft/4`, `ngram/8 depth 1`."""
        if self.label is not None:
            return self.label
        width = "" if self.max_width is None else f"/{self.max_width}"
        depth = "" if self.depth is None else f" depth {self.depth}"
        return f"{self.mode}{width}{depth}"

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the request body."""
        limits = {"mode": self.mode, "max_width": self.max_width, "depth": self.depth}
        return {"speculation": {name: value for name, value in limits.items() if value is not None}}


OFF: Final = Setting("off")
# What a comparison shows where there is no difference: the noise of the machine.
OFF_AGAIN: Final = Setting("off", label="off again")
AUTO: Final = Setting("auto")
DRAFT: Final = Setting("draft")
NGRAM: Final = Setting("ngram")
REPLAY: Final = Setting("replay")


@dataclass(frozen=True)
class Pair:
    """Two answers to one question."""

    base: Sample
    """What `other` is compared with."""
    other: Sample
    """Answer under the compared setting."""

    @property
    def speed_up(self) -> float:
        """Ratio of the decode rate of `other` to the base's."""
        return self.other.tokens_per_s / self.base.tokens_per_s

    @property
    def is_fork(self) -> bool:
        """Whether the texts differ."""
        return self.base.text != self.other.text

    @property
    def common_share(self) -> float:
        """Share of the base's text that both have in common from the start, in [0, 1]."""
        longest = max(len(self.base.text), len(self.other.text), 1)
        same = 0
        for left, right in zip(self.base.text, self.other.text, strict=False):
            if left != right:
                return same / longest
            same += 1
        return 1.0 if not self.is_fork else same / longest


@dataclass(frozen=True)
class Place:
    """Common fields of the samples of a row; see `Sample`."""

    is_raw: bool
    is_warm: bool
    delay_ms: float
    temperature: float
    workload: str
    system: str
    server: str
    setting: str

    @property
    def is_cold_chat(self) -> bool:
        """Whether the questions came through the chat endpoint, each for the first time."""
        return not (self.is_raw or self.is_warm)

    @property
    def label(self) -> str:
        """Setting and server, for a reader."""
        return f"{self.setting} ({self.server})"

    @classmethod
    def of(cls, sample: Sample) -> Place:
        """Row of a sample."""
        return cls(**{name: getattr(sample, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Row:
    """Means over the answers of one place."""

    place: Place
    """Conditions of the row."""
    num_answers: int
    """How many."""
    tokens_per_s: float
    """Mean decode rate."""
    speed_up: float | None
    """Mean over the pairs with `off`; None for `off` itself and for other systems."""
    speed_up_low: float | None
    """Of the slowest pair."""
    speed_up_high: float | None
    """Of the fastest pair."""
    sound_speed_up: float | None
    """Mean over the pairs of which neither answer goes in circles; None without any."""
    fork_rate: float | None
    """Share of the answers whose text differs from that of `off`; None like `speed_up`."""
    degenerate_rate: float
    """Share of the answers that go in circles."""
    ttft_ms: float
    """Median."""
    itl_ms: tuple[float, float, float]
    """50th, 95th and 99th percentile over all gaps between arrivals."""
    tokens_per_window: float | None
    """Tokens that a pass through the target brought, plain passes too; None if unknown."""
    mean_accepted: float | None
    """Accepted tokens of a pass that carried proposed ones; None if unknown."""
    acceptance: float | None
    """Accepted of all proposed tokens, in [0, 1]; None if none was proposed."""
    acceptance_per_position: tuple[float, ...]
    """Entry `i`: of the passes with more than `i` proposed tokens, the share that had all up to there
    accepted; unconditional: what lies behind a rejected token counts as rejected."""
    drafts_per_position: tuple[int, ...]
    """Entry `i`: how many passes that is a share of."""
    by_depth: DepthStatistics
    """Tokens by distance from the drafter's last feature, of drafters that read features."""
    features: FeatureCounts | None
    """Features that the drafter wanted and got; None without such a drafter."""
    tokens_per_pass: float | None
    """Mean number of tokens that are drafted at once; None without a drafter."""
    pass_ms: float | None
    """Mean time of drafting them; None likewise."""


def add_up(rows: Any) -> tuple[int, ...]:
    """Entry by entry, shorter rows counting as zero beyond their end."""
    total: list[int] = []
    for row in rows:
        total += [0] * (len(row) - len(total))
        for index, value in enumerate(row):
            total[index] += value
    return tuple(total)


def median_ratio(groups: Sequence[ConcurrentRequests], num_at_once: int, setting: str) -> float | None:
    """Over the rounds with so many at once; None without any."""
    found = [group.ratio for group in groups if group.num_at_once == num_at_once and group.setting == setting]
    return median(found) if found else None


def pairs_with_off(samples: Iterable[Sample], system: str = MESH) -> tuple[Pair, ...]:
    """Each answer of a mesh under a setting, with its answer under `off` of the same turn."""
    turns = _by_turn(sample for sample in samples if sample.system == system)
    return tuple(
        Pair(off, sample)
        for turn in turns
        for off in turn
        if off.setting == OFF.name
        for sample in turn
        if sample.setting != OFF.name
    )


def pairs_with_rpc(samples: Iterable[Sample], setting: str) -> tuple[Pair, ...]:
    """Each answer of the mesh under a setting, with llama.cpp RPC's of the same turn."""
    return tuple(
        Pair(rpc, sample)
        for turn in _by_turn(samples)
        for rpc in turn
        if rpc.system == LLAMA_RPC
        for sample in turn
        if sample.system == MESH and sample.setting == setting
    )


def pairs_with_checkout(samples: Iterable[Sample]) -> dict[tuple[str, float, str], list[Pair]]:
    """Answers of the mesh with those of another checkout's under the same setting, in the same turn.

    Returns:
        By name of the other mesh, delay and setting.
    """
    found: dict[tuple[str, float, str], list[Pair]] = {}
    for turn in _by_turn(samples):
        for other in turn:
            if other.system in {MESH, LLAMA_RPC}:
                continue
            key = other.system, other.delay_ms, other.setting
            found.setdefault(key, []).extend(
                Pair(other, own) for own in turn if own.system == MESH and own.setting == other.setting
            )
    return found


def is_off(sample: Sample) -> bool:
    """Whether it is plain decoding by the mesh."""
    return sample.system == MESH and sample.setting == OFF.name


def _by_turn(samples: Iterable[Sample]) -> Sequence[list[Sample]]:
    turns: dict[int, list[Sample]] = {}
    for sample in samples:
        turns.setdefault(sample.turn, []).append(sample)
    return list(turns.values())


def rows_of(samples: Sequence[Sample]) -> tuple[Row, ...]:
    """A row for every place: workloads in the order measured, `off` first and `replay` last in each."""
    pairs: dict[Place, list[Pair]] = {}
    for pair in pairs_with_off(samples):
        pairs.setdefault(Place.of(pair.other), []).append(pair)
    places: dict[Place, list[Sample]] = {}
    for sample in samples:
        places.setdefault(Place.of(sample), []).append(sample)
    workloads = list(dict.fromkeys(place.workload for place in places))
    in_order = sorted(
        places, key=lambda place: (place.delay_ms, workloads.index(place.workload), _rank(place))
    )
    return tuple(_row(place, places[place], pairs.get(place, [])) for place in in_order)


def mean_speed_up(rows: Sequence[Row], is_wanted: Callable[[Place], bool]) -> float | None:
    """Arithmetic mean over the rows wanted, so that each workload weighs the same; None without any."""
    found = [row.speed_up for row in rows if row.speed_up is not None and is_wanted(row.place)]
    return fmean(found) if found else None


def _rank(place: Place) -> tuple[bool, float, str, int, int]:
    mode, _, width = place.setting.partition("/")
    rank = _MODES.index(mode) if mode in _MODES else len(_MODES)
    number = int(width) if width.isdigit() else 0
    return place.system != MESH, place.temperature, place.server, rank, number


def _row(place: Place, samples: Sequence[Sample], pairs: Sequence[Pair]) -> Row:
    speed_ups = [pair.speed_up for pair in pairs]
    sound = [
        pair.speed_up
        for pair in pairs
        if not (is_degenerate(pair.base.text) or is_degenerate(pair.other.text))
    ]
    gaps_ms = [gap for sample in samples for gap in sample.gaps_ms]
    low, middle, high = np.percentile(gaps_ms, [50, 95, 99]) if gaps_ms else (0.0, 0.0, 0.0)
    counts = [sample.counts for sample in samples]
    num_windows = sum(count.num_windows for count in counts)
    num_drafts = sum(count.num_drafts for count in counts)
    num_drafted = sum(count.num_drafted for count in counts)
    num_accepted = sum(count.num_accepted for count in counts)
    drafted = add_up(count.drafted_per_position for count in counts)
    accepted = add_up(count.accepted_per_position for count in counts)
    features = [count.features for count in counts if count.features is not None]
    passes = [
        (count.draft_tokens_per_pass or 1.0, count.draft_ms_per_token)
        for count in counts
        if count.draft_ms_per_token is not None
    ]
    num_tokens = sum(sample.num_tokens for sample in samples)
    return Row(
        place=place,
        num_answers=len(samples),
        tokens_per_s=fmean(sample.tokens_per_s for sample in samples),
        speed_up=fmean(speed_ups) if speed_ups else None,
        speed_up_low=min(speed_ups, default=None),
        speed_up_high=max(speed_ups, default=None),
        sound_speed_up=fmean(sound) if sound else None,
        fork_rate=fmean(pair.is_fork for pair in pairs) if pairs else None,
        degenerate_rate=fmean(is_degenerate(sample.text) for sample in samples),
        ttft_ms=median(sample.ttft_ms for sample in samples),
        itl_ms=(float(low), float(middle), float(high)),
        # The first token of an answer comes with the prompt, not with a window.
        tokens_per_window=(num_tokens - len(samples)) / num_windows if num_windows else None,
        mean_accepted=num_accepted / num_drafts if num_drafts else None,
        acceptance=num_accepted / num_drafted if num_drafted else None,
        acceptance_per_position=tuple(
            part / whole for part, whole in zip_longest(accepted, drafted, fillvalue=0) if whole
        ),
        drafts_per_position=drafted,
        by_depth=reduce(DepthStatistics.merge, (count.by_depth for count in counts)),
        features=reduce(FeatureCounts.merge, features) if features else None,
        tokens_per_pass=fmean(tokens for tokens, _ in passes) if passes else None,
        pass_ms=fmean(tokens * ms for tokens, ms in passes) if passes else None,
    )
