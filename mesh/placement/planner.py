"""Planner: placement of a model's layers on hosts, and remedies when it does not fit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from mesh.placement.gpu_layers import memory_on
from mesh.placement.host_assignment import StageTable, find_assignment, never
from mesh.placement.memory_estimate import StageSizes, Workload
from spanmesh_proto.errors import ModelDoesNotFit, NotEnoughHosts, UncuttableModel
from stages.runtime.kv_types import KV_TYPES, fits_heads
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.placement.host_assignment import HostAssignment
    from mesh.placement.host_capacity import HostCapacity
    from stages.layers import LayerRange
    from stages.runtime.process_memory import StageMemory
    from stages.slicing.model_facts import ModelFacts

# Half of f16's size, and among the smaller types the one that changes a text least.
_COMPACT: Final = "q8_0"
# Step in which caches grow, in positions.
_CTX_STEP: Final = 256
# Two measurements of the same host differ by this share, so smaller differences are ignored.
SPEED_NOISE: Final = 0.25


@dataclass(frozen=True)
class StagePlacement:
    """One stage of a plan."""

    host: str
    """Name of the host that holds it."""
    layers: LayerRange
    """Its layers."""
    memory: StageMemory
    """Memory that it takes."""


@dataclass(frozen=True)
class Plan:
    """Stages in pipeline order, and the reason for them."""

    stages: tuple[StagePlacement, ...]
    """At least one; together they hold every layer once."""
    reason: str
    """One line for the operator."""


def remedies(model: ModelFacts, workload: Workload, fits: Callable[[Workload], bool]) -> list[str]:
    """Options, each of which alone makes the model fit, the least invasive first.

    Args:
        model: The model that does not fit.
        workload: The workload with which it does not.
        fits: Whether it fits with another workload.

    Returns:
        Options of the command line; empty if nothing helps.
    """
    found = []
    compact = KV_TYPES[_COMPACT]
    is_smaller = compact.num_bytes(compact.block_width) < KV_TYPES[workload.kv_type].num_bytes(
        compact.block_width
    )
    if is_smaller and fits_heads(compact, model.head_widths) and fits(replace(workload, kv_type=_COMPACT)):
        found.append(f"--kv-type {_COMPACT}")
    checkpoints = _most(workload.num_checkpoints - 1, lambda n: fits(replace(workload, num_checkpoints=n)))
    if checkpoints:
        found.append(f"--checkpoints {checkpoints}")
    steps = _most((workload.ctx_size - 1) // _CTX_STEP, lambda n: fits(_with_ctx(workload, n * _CTX_STEP)))
    if steps:
        found.append(f"--ctx-size {steps * _CTX_STEP}")
    slots = _most(workload.num_slots - 1, lambda n: fits(replace(workload, num_slots=n)))
    if slots:
        found.append(f"--parallel {slots}")
    return found


def _with_ctx(workload: Workload, ctx_size: int) -> Workload:
    return replace(workload, ctx_size=ctx_size)


def _most(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `limit` for which `holds`, which must hold for all below one; 0 if none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def plan(
    model: ModelFacts,
    hosts: Sequence[HostCapacity],
    workload: Workload,
    *,
    num_stages: int | None = None,
    split: Sequence[int] | None = None,
    is_time_up: Callable[[], bool] = never,
) -> Plan:
    """Place a model on hosts.

    If one host can hold everything it does, since every hop costs time. Otherwise as few hosts as can hold
    it, the fastest first, with layers such that every stage reads its weights in about the same time, as far
    as memory and the model's allowed cuts permit.

    Args:
        model: The model.
        hosts: In the order in which they joined, which is kept where nothing speaks against it.
        workload: What the KV caches must hold.
        num_stages: Exactly this many stages; hosts take several each if there are fewer hosts.
        split: Exactly these numbers of layers, stage by stage.
        is_time_up: Called during the search for a better plan: whether to stop with the best one so far.

    Raises:
        ModelDoesNotFit: With the memory that is needed and that each host has.
        UncuttableModel: If the model cannot be cut into so many stages, or not at these places.
        NotEnoughHosts: If there is no host.

    Example:
        Three equal hosts, none of which can hold the model alone, get `[0, 10)`, `[10, 20)` and `[20, 30)` of
        30 equal layers with a small head.
    """
    if not hosts:
        raise NotEnoughHosts("no host can take a stage: join one with `mesh join`, or leave out --head-only")
    check_stages(model, num_stages=num_stages, split=split)
    if split is not None:
        num_stages = len(split)
    sizes = StageSizes(model, workload, None if split is None else _cuts_of(split))
    even = even_out_noise(hosts)
    assignment = find_assignment(StageTable(sizes), even, num_stages, is_time_up)
    if assignment is None:

        def fits(other: Workload) -> bool:
            # The first plan found suffices.
            table = StageTable(replace(sizes, workload=other))
            return find_assignment(table, even, num_stages, lambda: is_time_up() or True) is not None

        raise _does_not_fit(sizes, hosts, fits)
    stages = _placed(assignment, sizes)
    if split is not None:
        return Plan(stages, "layers as given by --split")
    if num_stages is not None:
        return Plan(stages, f"{_count(num_stages, 'stage')} asked for")
    return Plan(stages, _reason(sizes, stages, assignment.least_stages))


def check_stages(
    model: ModelFacts, *, num_stages: int | None = None, split: Sequence[int] | None = None
) -> None:
    """Check the requested stages before any host is known.

    Raises:
        UncuttableModel: If the model cannot be cut into so many stages, or not at these places.
    """
    if split is not None:
        _check_split(split, model)
    if num_stages is not None and num_stages not in (counts := model.stage_counts):
        most = max(counts)
        is_length = model.refused_lengths and 1 <= num_stages <= len(model.allowed_cuts) + 1
        reasons = [*model.refused_lengths.values()] if is_length else []
        why = f": {reasons[0]}" if reasons else "" if model.allowed_cuts else f": {why_in_one_piece(model)}"
        raise UncuttableModel(
            f"{model.name} ({model.architecture}) can be cut into 1 to {most} stages, not {num_stages}{why}",
            param="--stages",
        )


def even_out_noise(hosts: Sequence[HostCapacity]) -> tuple[HostCapacity, ...]:
    """The same hosts in the same order, speeds that differ by no more than noise made equal.

    From the fastest down: hosts within `SPEED_NOISE` of the fastest of a group belong to it, and all of them
    count as slow as its slowest member.
    """
    fastest = slowest = 0.0
    even: dict[int, float] = {}
    group: list[int] = []
    for index in sorted(range(len(hosts)), key=lambda index: -hosts[index].fastest_gb_per_s):
        speed = hosts[index].fastest_gb_per_s
        if speed < fastest * (1 - SPEED_NOISE):
            group = []
        if not group:
            fastest = speed
        group.append(index)
        slowest = speed
        even.update(dict.fromkeys(group, slowest))
    return tuple(host.at_speed(even[index]) for index, host in enumerate(hosts))


def _placed(assignment: HostAssignment, sizes: StageSizes) -> tuple[StagePlacement, ...]:
    return tuple(
        StagePlacement(host.name, part, memory)
        for host, part in zip(assignment.hosts, assignment.layers, strict=True)
        if (memory := memory_on(sizes, part, host)) is not None
    )


def _cuts_of(split: Sequence[int]) -> tuple[int, ...]:
    """First layers of stages with these numbers of layers, 0 left out."""
    return tuple(itertools.accumulate(split))[:-1]


def _check_split(split: Sequence[int], model: ModelFacts) -> None:
    shown = ",".join(map(str, split))
    if any(count < 1 for count in split) or sum(split) != model.n_layers:
        raise UncuttableModel(
            f"--split {shown} makes {sum(split)} layers; {model.name} has {model.n_layers}, at least 1 a "
            "stage",
            param="--split",
        )
    forbidden = [cut for cut in _cuts_of(split) if cut not in model.allowed_cuts]
    if forbidden:
        why = model.refused_cuts.get(forbidden[0])
        raise UncuttableModel(
            f"--split {shown}: {model.name} ({model.architecture}) cannot be cut at layer {forbidden[0]}"
            + (f": {why}" if why else ""),
            param="--split",
        )
    for count in split:
        if count in model.refused_lengths and len(split) > 1:
            raise UncuttableModel(
                f"--split {shown}: no stage of {model.name} can have {count} layers: "
                f"{model.refused_lengths[count]}",
                param="--split",
            )


def why_in_one_piece(model: ModelFacts) -> str:
    """Reason why a model cannot be cut anywhere."""
    return next(iter(model.refused_cuts.values()), "it has one layer")


def _reason(sizes: StageSizes, stages: tuple[StagePlacement, ...], least: int) -> str:
    if not sizes.model.allowed_cuts:
        return (
            f"{sizes.model.architecture} runs on one host, {stages[0].host}: {why_in_one_piece(sizes.model)}"
        )
    weights = format_size(sizes.weight_bytes(sizes.whole))
    if len(stages) == 1:
        return f"host {stages[0].host} can hold the whole model ({weights}), and a split would only add hops"
    if len(stages) > least:
        return f"{least} hosts can just hold its {weights}, and {len(stages)} are faster"
    return f"no fewer than {len(stages)} hosts can hold its {weights}"


def _does_not_fit(
    sizes: StageSizes, hosts: Sequence[HostCapacity], fits: Callable[[Workload], bool]
) -> ModelDoesNotFit:
    workload, memory = sizes.workload, sizes.memory(sizes.whole)
    helping = remedies(sizes.model, workload, fits)
    return ModelDoesNotFit(
        f"{sizes.model.name} does not fit: it needs {format_size(memory.weight_bytes)} for weights, "
        f"{format_size(memory.cache_bytes)} for {workload.num_slots} x {workload.ctx_size} positions in "
        f"{workload.kv_type}, {format_size(memory.buffer_bytes)} for buffers and "
        f"{format_size(memory.process_bytes)} for the process of each stage; free are "
        + ", ".join(map(str, hosts))
        + _remedy(sizes.model, helping)
    )


def _remedy(model: ModelFacts, helping: Sequence[str]) -> str:
    more = (
        "more hosts" if model.allowed_cuts else f"a larger one: it cannot be cut, {why_in_one_piece(model)}"
    )
    return f"; it would fit with {' or '.join(helping)}, or join {more}" if helping else f"; join {more}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
