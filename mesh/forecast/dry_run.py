"""Dry run of `mesh plan`: a plan and its times, with nothing loaded."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol

from mesh.forecast.cost_model import (
    Forecast,
    StageForecast,
    forecast,
    parts_to_profile,
    position_ms,
    stage_timing,
)
from mesh.placement.context_choice import EXAMINED_S, choose_context
from mesh.placement.host_capacity import in_one_kind
from mesh.placement.link_choices import has_an_order, ordered_by_links
from mesh.placement.memory_estimate import StageSizes
from mesh.placement.planner import plan
from stages.host.profile_request import ProfileRequest
from stages.layers import LayerRange
from stages.runtime.kv_types import KV_TYPES, fits_heads
from stages.runtime.llama_libraries import attention_name
from stages.runtime.numerics import FAST_MAX_ROWS
from stages.slicing.stage_writer import blank_stage
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mesh.placement.context_choice import ContextChoice
    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.links import Links
    from mesh.placement.memory_estimate import Workload
    from mesh.placement.planner import Plan, StagePlacement
    from mesh.placement.topology import Topology
    from stages.host.profile_request import StageTiming
    from stages.slicing.model_facts import ModelFacts
    from stages.slicing.source_model import SourceModel

# A stage pauses between two tokens as long as the wire and the other stages take; beyond this pause no
# processor becomes slower.
_LEAST_PAUSE_MS: Final = 1.0
_MOST_PAUSE_MS: Final = 25.0
# Of the memory of a plan; below it the choice of the format hardly matters.
_LARGE_CACHE_SHARE: Final = 0.25


@dataclass(frozen=True)
class KnownHost:
    """A host of a forecast."""

    capacity: HostCapacity
    """Its capacity for the planner."""
    num_threads: int
    """Its compute threads."""
    absent: str = ""
    """Reason why it can hold nothing now; empty if it can."""


@dataclass(frozen=True)
class HostProfile:
    """Timings that a host measured."""

    timings: tuple[StageTiming, ...] = ()
    """One for each request; empty if it failed."""
    failure: str = ""
    """Reason of the failure, or empty."""


class Timer(Protocol):
    """Times blank stages on hosts."""

    def __call__(self, wanted: Mapping[str, Sequence[ProfileRequest]]) -> Mapping[str, HostProfile]:
        """Profile of each host, for its requests."""


@dataclass(frozen=True)
class PlanningContext:
    """Hosts and links of a plan."""

    hosts: tuple[KnownHost, ...]
    """In the order in which they joined."""
    head: str
    """Name of the coordinator's host; not necessarily one of them."""
    links: Links
    """Links between all of them."""
    timer: Timer
    """Times blank stages on them."""
    basis: str
    """Source of its timings, for display."""


@dataclass(frozen=True)
class DryRunOptions:
    """Options of `mesh plan`."""

    workload: Workload
    """What stages hold besides weights."""
    worker_bytes: int
    """Memory of the head's processes for texts and bodies, vocabularies aside."""
    text_bytes: int
    """Memory of the model's vocabulary in all processes for texts."""
    draft_bytes: int = 0
    """Memory of the drafter on the head's host; of one beside the last stage, the model's facts have it."""
    picture_bytes: int = 0
    """Memory of the processes for pictures there."""
    are_pictures_measured: bool = False
    """Whether that was measured."""
    num_stages: int | None = None
    """Number of stages, or None for the planner's choice."""
    split: tuple[int, ...] | None = None
    """Layers of each stage, or None for the planner's choice."""
    topology: Topology | None = None
    """Locked placement, or None for the planner's choice."""
    prompt_tokens: int = 128
    """Length of the prompt for the time to the first token."""
    is_timed: bool = True
    """Whether hosts may be asked to compute."""
    chooses_context: bool = False
    """Whether the workload's context is the least of those that may be chosen."""


@dataclass(frozen=True)
class DryRun:
    """Result of `mesh plan`."""

    model: ModelFacts
    """Facts of the model."""
    plan: Plan
    """The plan."""
    hosts: tuple[KnownHost, ...]
    """All hosts, the head's with what processes for texts and bodies leave."""
    left_out: dict[str, str]
    """Hosts without a stage, with the reasons."""
    timings: tuple[StageTiming, ...] | None
    """Times of each stage, in order; None if they were not measured."""
    forecast: Forecast | None
    """Forecast for one session; None if there is none."""
    basis: str
    """Basis of the forecast, or the reason why there is none."""
    head: str
    """Name of the coordinator's host; not necessarily one of them."""
    worker_bytes: int
    """Memory of the head's processes for texts and bodies, vocabularies aside."""
    text_bytes: int
    """Memory of the model's vocabulary in all processes for texts, on the head's host."""
    draft_bytes: int = 0
    """Memory of the drafter there."""
    picture_bytes: int = 0
    """Memory of the processes for pictures there."""
    are_pictures_measured: bool = False
    """Whether that was measured."""
    context: ContextChoice | None = None
    """Choice of the context; None if one was asked for."""
    q8_0_cache_bytes: int | None = None
    """KV caches of all stages in q8_0; None where it has no advantage."""

    def free_after_bytes(self, host: str) -> int:
        """Memory that a host would have left."""
        taken = sum(stage.memory.total_bytes for stage in self.plan.stages if stage.host == host)
        return next(each.capacity.memory_bytes for each in self.hosts if each.capacity.name == host) - taken

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "model": {
                "name": self.model.name,
                "architecture": self.model.architecture,
                "layers": self.model.n_layers,
                "file_bytes": self.model.file_bytes,
            },
            "reason": self.plan.reason,
            "context": None if self.context is None else self.context.as_dict(),
            "head": {
                "host": self.head,
                "worker_bytes": self.worker_bytes,
                "text_bytes": self.text_bytes,
                "draft_bytes": self.draft_bytes,
                "picture_bytes": self.picture_bytes,
                "pictures_measured": self.are_pictures_measured,
            },
            "stages": [
                {
                    "host": stage.host,
                    "layers": [stage.layers.start, stage.layers.stop],
                    "weight_bytes": stage.memory.weight_bytes,
                    "cache_bytes": stage.memory.cache_bytes,
                    "buffer_bytes": stage.memory.buffer_bytes,
                    "total_bytes": stage.memory.total_bytes,
                    "gpus": [asdict(share) for share in stage.memory.gpus],
                    "cpu_moe_layers": stage.memory.cpu_moe_layers,
                    "free_after_bytes": self.free_after_bytes(stage.host),
                    "row_ms": None if self.timings is None else round(self.timings[index].row_ms, 3),
                    "chunk_ms": None if self.timings is None else round(self.timings[index].chunk_ms, 3),
                }
                for index, stage in enumerate(self.plan.stages)
            ],
            "left_out": [{"host": host, "reason": reason} for host, reason in self.left_out.items()],
            "q8_0_cache_bytes": self.q8_0_cache_bytes,
            "prediction": None if self.forecast is None else self.forecast.as_dict(),
            "basis": self.basis,
        }


def left_out(sizes: StageSizes, plan: Plan, hosts: Iterable[KnownHost]) -> dict[str, str]:
    """Reason for each host without a stage in the plan, by name."""
    chosen = {stage.host for stage in plan.stages}
    least_bytes = min(
        sizes.memory(LayerRange(start, stop)).total_bytes for start, stop in pairwise(sizes.edges)
    )
    return {
        host.capacity.name: host.absent or _reason(host, plan, least_bytes)
        for host in hosts
        if host.capacity.name not in chosen
    }


def _reason(host: KnownHost, plan: Plan, least_bytes: int) -> str:
    memory_bytes = host.capacity.memory_bytes
    if host.capacity.is_apart:
        return (
            f"kept apart: --exact, and attention is computed by "
            f"{attention_name(host.capacity.attention_version)} there"
        )
    if memory_bytes < least_bytes:
        return (
            f"too small: it offers {format_size(memory_bytes)}, the smallest share needs "
            f"{format_size(least_bytes)}"
        )
    count = len({stage.host for stage in plan.stages})
    enough = "one host is enough" if count == 1 else f"{count} hosts are enough"
    return f"not needed: {enough}, and one more hop costs time; it would be a spare"


def dry_run(
    source: SourceModel, model: ModelFacts, context: PlanningContext, options: DryRunOptions
) -> DryRun:
    """Plan, and time the planned stages.

    Args:
        source: Source of the model, for blank stages.
        model: Facts of the model.
        context: Hosts and links.
        options: Options of `mesh plan`.

    Raises:
        ModelDoesNotFit: With the memory that is needed and that each host has.
        UncuttableModel: If the model cannot be cut as requested.
        NotEnoughHosts: If there is no host, or a host to which layers are locked is missing.
    """
    context = _with_head(context, options)
    if options.workload.is_exact:
        context = _in_one_kind(context)
    placed = _placed(model, context, options)
    sizes = StageSizes(model, options.workload)
    chosen: ContextChoice | None = None
    if options.chooses_context:
        placed, choice = _with_context(sizes, placed, context, options)
        sizes = replace(sizes, workload=replace(options.workload, ctx_size=choice.ctx_size))
        chosen = choice
    timings: tuple[StageTiming, ...] | None = None
    basis = "no timing: --no-timing"
    if options.is_timed:
        found = _timed(source, sizes, placed, context, options)
        if isinstance(found, str):
            basis = found
        else:
            timings, basis = found, context.basis
    predicted = None
    if timings is not None:
        if context.links.knows([context.head, *(stage.host for stage in placed.stages)]):
            capacities = {host.capacity.name: host.capacity for host in context.hosts}
            predicted = forecast(
                [
                    StageForecast(stage.host, timing, position_ms(sizes, stage, capacities[stage.host]))
                    for stage, timing in zip(placed.stages, timings, strict=True)
                ],
                context.head,
                context.links.hop_ms,
                prompt_tokens=options.prompt_tokens,
                most_positions=sizes.workload.ctx_size,
            )
        else:
            basis = "no prediction: not every link could be measured; `mesh bench net` shows why"
    return DryRun(
        model=model,
        plan=placed,
        hosts=context.hosts,
        left_out=left_out(sizes, placed, context.hosts),
        timings=timings,
        forecast=predicted,
        basis=basis,
        head=context.head,
        worker_bytes=options.worker_bytes,
        text_bytes=options.text_bytes,
        draft_bytes=options.draft_bytes,
        picture_bytes=options.picture_bytes,
        are_pictures_measured=options.are_pictures_measured,
        context=chosen,
        q8_0_cache_bytes=_q8_0_cache_bytes(sizes, placed, context),
    )


def _q8_0_cache_bytes(sizes: StageSizes, placed: Plan, context: PlanningContext) -> int | None:
    """KV caches in q8_0, where they need less memory and no more time."""
    is_slow = any(
        host.capacity.attention_version == 0
        for host in context.hosts
        if host.capacity.name in {stage.host for stage in placed.stages}
    )
    is_small = KV_TYPES[sizes.workload.kv_type].is_quantised
    if is_slow or is_small or not fits_heads(KV_TYPES["q8_0"], sizes.model.head_widths):
        return None
    caches = sum(stage.memory.cache_bytes for stage in placed.stages)
    if caches < _LARGE_CACHE_SHARE * sum(stage.memory.total_bytes for stage in placed.stages):
        return None
    smaller = replace(sizes, workload=replace(sizes.workload, kv_type="q8_0"))
    return sum(smaller.cache_bytes(stage.layers) for stage in placed.stages)


def _with_head(context: PlanningContext, options: DryRunOptions) -> PlanningContext:
    """The same hosts, the head's with what its processes for requests, and the drafter, leave."""
    request_bytes = options.worker_bytes + options.text_bytes + options.picture_bytes
    hosts = [
        replace(
            host, capacity=host.capacity.on_head(draft_bytes=options.draft_bytes, request_bytes=request_bytes)
        )
        if host.capacity.name == context.head
        else host
        for host in context.hosts
    ]
    return replace(context, hosts=tuple(hosts))


def _in_one_kind(context: PlanningContext) -> PlanningContext:
    """The same hosts, without room where attention is computed otherwise than on most."""
    present = [host for host in context.hosts if not host.absent]
    kept = in_one_kind([host.capacity for host in present])
    found = {capacity.name: capacity for capacity in kept}
    hosts = [replace(host, capacity=found.get(host.capacity.name, host.capacity)) for host in context.hosts]
    return replace(context, hosts=tuple(hosts))


def _with_context(
    sizes: StageSizes, placed: Plan, context: PlanningContext, options: DryRunOptions
) -> tuple[Plan, ContextChoice]:
    until_s = time.monotonic() + EXAMINED_S
    return choose_context(
        sizes,
        placed,
        [host.capacity for host in context.hosts if not host.absent],
        may_move=options.topology is None,
        is_time_up=lambda: time.monotonic() >= until_s,
    )


def _placed(model: ModelFacts, context: PlanningContext, options: DryRunOptions) -> Plan:
    hosts = [host.capacity for host in context.hosts if not host.absent]
    if options.topology is not None:
        options.topology.check(model)
        return options.topology.plan(StageSizes(model, options.workload), hosts)

    def place(ordered: Sequence[HostCapacity]) -> Plan:
        return plan(model, ordered, options.workload, num_stages=options.num_stages, split=options.split)

    as_joined = place(hosts)
    if not has_an_order(as_joined, context.head):
        return as_joined
    found = ordered_by_links(hosts, as_joined, place, context.head, context.links)
    return as_joined if found is None else found.plan


def _timed(
    source: SourceModel, sizes: StageSizes, placed: Plan, context: PlanningContext, options: DryRunOptions
) -> tuple[StageTiming, ...] | str:
    """Times of each stage, or the reason why they are unknown."""
    num_threads = {host.capacity.name: host.num_threads for host in context.hosts}
    num_stages = Counter(stage.host for stage in placed.stages)
    pause_ms = _pause_ms(placed.stages, context)
    parts = [parts_to_profile(sizes, stage.layers) for stage in placed.stages]
    wanted: dict[str, list[ProfileRequest]] = {}
    for stage, its_parts in zip(placed.stages, parts, strict=True):
        wanted.setdefault(stage.host, []).extend(
            ProfileRequest(
                blank=blank_stage(source, part.layers),
                # As `mesh serve` divides them among the stages of one host.
                num_threads=max(1, num_threads[stage.host] // num_stages[stage.host]),
                is_exact=options.workload.is_exact,
                kv_type=options.workload.kv_type,
                # A table of positions may end at the training length.
                position=max(0, min(options.prompt_tokens, sizes.model.n_ctx_train - FAST_MAX_ROWS)),
                pause_ms=pause_ms,
                gpu_layers=_gpu_layers(stage, part.layers),
                cpu_moe_layers=_share_of(stage.memory.cpu_moe_layers, stage.layers, part.layers),
            )
            for part in its_parts
        )
    profile = context.timer(wanted)
    for host in wanted:
        if profile[host].failure:
            return f"no prediction: {profile[host].failure}"
    answers = {host: iter(profile[host].timings) for host in wanted}
    return tuple(
        stage_timing(its_parts, {part.layers: next(answers[stage.host]) for part in its_parts})
        for stage, its_parts in zip(placed.stages, parts, strict=True)
    )


def _gpu_layers(stage: StagePlacement, part: LayerRange) -> tuple[tuple[str, int], ...]:
    """Layers of a part on each device, in about the stage's proportions: its time stands for the stage's."""
    shares, left = [], len(part)
    # From the last layer down, as in the stage.
    for device, count in reversed(stage.memory.gpu_layers):
        share = min(left, _share_of(count, stage.layers, part))
        if share:
            shares.append((device, share))
        left -= share
    return tuple(reversed(shares))


def _share_of(count: int, layers: LayerRange, part: LayerRange) -> int:
    """A number of a stage's layers, in the proportion of a part of it."""
    return round(count * len(part) / len(layers))


def _pause_ms(stages: Sequence[StagePlacement], context: PlanningContext) -> float:
    way = [context.head, *(stage.host for stage in stages)]
    if not context.links.knows(way):
        return _LEAST_PAUSE_MS
    wire_ms = sum(context.links.hop_ms(a, b) for a, b in zip(way, [*way[1:], context.head], strict=True))
    return min(_MOST_PAUSE_MS, max(_LEAST_PAUSE_MS, wire_ms))
