"""Which host holds which layers. Pure: facts in, plan out."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from mesh.host_capacity import HostCapacity
from mesh.offload import memory_on, read_time
from mesh.remedies import remedies
from mesh.stage_sizes import PROCESS_BYTES, StageSizes, Workload
from spanmesh_proto.errors import ModelDoesNotFit, NotEnoughHosts, UncuttableModel
from stages.byte_size import format_size
from stages.layers import LayerRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stages.cutting import ModelFacts
    from stages.stage_memory import StageMemory

# Two measurements of the same host differ by this share, so a smaller difference says nothing.
SPEED_NOISE: Final = 0.25
_MAX_ORDERS: Final = 24
_MAX_CHOICES: Final = 32

__all__ = [
    "SPEED_NOISE",
    "HostCapacity",
    "Plan",
    "StagePlacement",
    "balance",
    "check_stages",
    "even_out_noise",
    "plan",
]


@dataclass(frozen=True)
class StagePlacement:
    """One stage of a plan.

    Attributes:
        host: Name of the host that holds it.
        layers: Which layers.
        memory: What it will take.
    """

    host: str
    layers: LayerRange
    memory: StageMemory


@dataclass(frozen=True)
class Plan:
    """Stages in pipeline order, and why they are these.

    Attributes:
        stages: At least one; together they hold every layer once.
        reason: One line for a person.
    """

    stages: tuple[StagePlacement, ...]
    reason: str


def plan(
    model: ModelFacts,
    hosts: Sequence[HostCapacity],
    workload: Workload,
    *,
    num_stages: int | None = None,
    split: Sequence[int] | None = None,
) -> Plan:
    """Place a model on hosts.

    One host that can hold everything does: every hop costs time. Otherwise as few hosts as can hold it, the
    fastest first, with layers such that every stage reads its weights in about the same time, as far as
    memory and the model's allowed cuts let it.

    Args:
        model: What is to be placed.
        hosts: In the order in which they came, which is kept where nothing speaks against it.
        workload: What the KV caches must hold.
        num_stages: Exactly this many stages; hosts take several each if there are fewer hosts.
        split: Exactly these numbers of layers, stage by stage.

    Raises:
        ModelDoesNotFit: With what is needed and what each host has.
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
    stages = _place(sizes, even, num_stages)
    if stages is None:
        raise _does_not_fit(
            sizes,
            hosts,
            lambda other: _place(replace(sizes, workload=other), even, num_stages) is not None,
        )
    if split is not None:
        return Plan(stages, "layers split by hand")
    if num_stages is not None:
        return Plan(stages, f"{_count(num_stages, 'stage')} asked for")
    return Plan(stages, _reason(sizes, stages))


def check_stages(
    model: ModelFacts, *, num_stages: int | None = None, split: Sequence[int] | None = None
) -> None:
    """Check what the user wants of the stages, before any host is known.

    Raises:
        UncuttableModel: If the model cannot be cut into so many stages, or not at these places.
    """
    if split is not None:
        _check_split(split, model)
    most = len(model.allowed_cuts) + 1
    if num_stages is not None and not 1 <= num_stages <= most:
        why = "" if model.allowed_cuts else f": {why_in_one_piece(model)}"
        raise UncuttableModel(
            f"{model.name} ({model.architecture}) can be cut into 1 to {most} stages, not {num_stages}{why}",
            param="--stages",
        )


def even_out_noise(hosts: Sequence[HostCapacity]) -> tuple[HostCapacity, ...]:
    """The same hosts in the same order, speeds that differ by no more than noise made equal.

    From the fastest down: whoever is within `SPEED_NOISE` of the fastest of a group belongs to it, and the
    whole group counts as its slowest member.
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


def _place(
    sizes: StageSizes, hosts: Sequence[HostCapacity], num_stages: int | None
) -> tuple[StagePlacement, ...] | None:
    """So many stages, or as few as can hold the model; None if the hosts are too small."""
    counts = range(1, min(len(hosts), len(sizes.edges) - 1) + 1) if num_stages is None else (num_stages,)
    return next((stages for count in counts if (stages := _best(sizes, hosts, count)) is not None), None)


def _best(
    sizes: StageSizes, hosts: Sequence[HostCapacity], num_stages: int
) -> tuple[StagePlacement, ...] | None:
    """Stages on the best hosts that can hold them, or None if none can."""
    for seats in _seatings(sizes, hosts, num_stages):
        layers = balance(sizes, seats)
        if layers is not None:
            return tuple(
                StagePlacement(host.name, part, memory)
                for host, part in zip(seats, layers, strict=True)
                if (memory := memory_on(sizes, part, host)) is not None
            )
    return None


def _seatings(
    sizes: StageSizes, hosts: Sequence[HostCapacity], num_stages: int
) -> Iterator[tuple[HostCapacity, ...]]:
    """Hosts stage by stage, the best idea first: fast ones, at last the roomiest, each in several orders."""
    num_hosts = min(num_stages, len(hosts))
    by_speed = sorted(range(len(hosts)), key=lambda index: -hosts[index].fastest_gb_per_s)
    by_memory = sorted(range(len(hosts)), key=lambda index: -hosts[index].all_bytes)
    fast = itertools.islice(itertools.combinations(by_speed, num_hosts), _MAX_CHOICES)
    needed_bytes = sizes.memory(sizes.whole).loading_bytes + num_stages * PROCESS_BYTES
    for chosen in itertools.chain(fast, [by_memory[:num_hosts]]):
        if sum(hosts[index].all_bytes for index in chosen) < needed_bytes:
            continue
        for order in itertools.islice(itertools.permutations(sorted(chosen)), _MAX_ORDERS):
            yield tuple(_seated([hosts[index] for index in order], num_stages))


def _seated(hosts: Sequence[HostCapacity], num_stages: int) -> Iterator[HostCapacity]:
    """Each host once or more in a row, its memory shared out among its stages."""
    for index, host in enumerate(hosts):
        times = (num_stages + len(hosts) - 1 - index) // len(hosts)
        yield from [host.divided(times)] * times


def balance(
    sizes: StageSizes, seats: Sequence[HostCapacity], part: LayerRange | None = None
) -> tuple[LayerRange, ...] | None:
    """Layers for these hosts in this order, so that the slowest stage is as fast as can be.

    Of the ways that are equally good by that measure, the most even one.

    Args:
        sizes: Of the model's stages.
        seats: One host for each stage, with what memory it may use.
        part: What is to be shared out; all layers unless given.

    Returns:
        Layers for each seat; None if the hosts are too small, or the model cannot be cut so often.
    """
    part = part or sizes.whole
    slowest = _shortest(sizes, seats, part, max)
    if slowest is None:
        return None
    limit = slowest[0] * (1 + 1e-9)
    evenest = _shortest(
        sizes, seats, part, lambda total, time: total + time * time if time <= limit else math.inf
    )
    return None if evenest is None else evenest[1]


def _shortest(
    sizes: StageSizes, seats: Sequence[HostCapacity], part: LayerRange, add: Callable[[float, float], float]
) -> tuple[float, tuple[LayerRange, ...]] | None:
    """The cheapest way through the part's layers, one stage a host; stage times are summed up by `add`."""
    reached: dict[int, tuple[float, tuple[LayerRange, ...]]] = {part.start: (0.0, ())}
    for seat in seats:
        step: dict[int, tuple[float, tuple[LayerRange, ...]]] = {}
        for start, (cost, way) in reached.items():
            for stop in sizes.edges:
                if not start < stop <= part.stop:
                    continue
                layers = LayerRange(start, stop)
                if len(layers) in sizes.model.refused_lengths and layers != sizes.whole:
                    continue
                memory = memory_on(sizes, layers, seat)
                if memory is None:
                    continue
                longer = add(cost, read_time(sizes, layers, memory, seat))
                if longer < step.get(stop, (math.inf,))[0]:
                    step[stop] = (longer, (*way, layers))
        reached = step
    return reached.get(part.stop)


def _cuts_of(split: Sequence[int]) -> tuple[int, ...]:
    """Where stages with these numbers of layers start, 0 left out."""
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
    """Why a model that cannot be cut anywhere cannot."""
    return next(iter(model.refused_cuts.values()), "it has one layer")


def _reason(sizes: StageSizes, stages: tuple[StagePlacement, ...]) -> str:
    if not sizes.model.allowed_cuts:
        return (
            f"{sizes.model.architecture} runs on one host, {stages[0].host}: {why_in_one_piece(sizes.model)}"
        )
    if len(stages) == 1:
        needed = format_size(stages[0].memory.total_bytes)
        return f"host {stages[0].host} can hold all of it ({needed}), and a split would only add hops"
    return f"no fewer than {len(stages)} hosts can hold its {format_size(sizes.weight_bytes(sizes.whole))}"


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
