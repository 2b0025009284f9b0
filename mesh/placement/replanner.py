"""Replanner: placement after a loss or a drain, and of replicas on spare hosts.

Surviving stages stay where they are as long as that is possible at all, because a recovery waits for loading.
So the result is not the plan that `mesh.placement.planner` would make of the same hosts, but the nearest one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mesh.placement.gpu_layers import memory_on
from mesh.placement.host_assignment import StageTable, assign_all, find_assignment, never
from mesh.placement.planner import StagePlacement, even_out_noise, plan
from spanmesh_proto.errors import ModelDoesNotFit, NotEnoughHosts
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.memory_estimate import StageSizes
    from mesh.placement.planner import Plan
    from stages.layers import LayerRange
    from stages.runtime.process_memory import StageMemory

# Of one stage: for a second loss before the first one is recovered from.
_MOST_REPLICAS: Final = 2


@dataclass(frozen=True)
class Replica:
    """A replica: layers loaded on a spare host, ready to become a stage."""

    host: str
    """Name of the host."""
    layers: LayerRange
    """Its layers."""


@dataclass(frozen=True)
class NewStage:
    """One stage of the new ring."""

    placement: StagePlacement
    """Its host and layers."""
    kept: int | None = None
    """Index of the stage of the old ring that becomes this one, or None."""
    is_replica: bool = False
    """Whether the host has it loaded as a `Replica`."""


@dataclass(frozen=True)
class Replan:
    """The new ring."""

    stages: tuple[NewStage, ...]
    """In pipeline order; together they hold every layer once."""
    dropped: tuple[Replica, ...]
    """Replicas that must be ended first: their memory is needed."""
    reason: str
    """One line for the operator."""
    starts_over: bool = False
    """Whether surviving stages are given up for it."""


class _Room:
    """Memory left on the hosts while stages are placed on them one by one."""

    def __init__(
        self,
        hosts: Sequence[HostCapacity],
        survivors: Iterable[StagePlacement],
        replicas: Iterable[Replica],
        *,
        had_stages: Collection[str],
    ) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.left = dict(self.hosts)
        self.num_stages = Counter(stage.host for stage in survivors)
        self.replicas = [replica for replica in replicas if replica.host in self.hosts]
        self.dropped: list[Replica] = []
        self._had_stages = had_stages
        for stage in survivors:
            if stage.host in self.left:
                self.left[stage.host] = self.left[stage.host].without(stage.memory)

    def memory_on(self, sizes: StageSizes, host: str, layers: LayerRange) -> StageMemory | None:
        """Memory of layers on a host, whose replicas can go; None if it is too full."""
        return memory_on(sizes, layers, self.left[host])

    def is_spare(self, host: str) -> bool:
        """Whether it holds no stage and has not just lost one, for an unknown reason."""
        return not self.num_stages[host] and host not in self._had_stages

    def take_replica(self, sizes: StageSizes, layers: LayerRange) -> StagePlacement | None:
        """The placement of layers on a host whose replica becomes the stage; None if there is none."""
        for replica in sorted(self.replicas, key=lambda replica: not self.is_spare(replica.host)):
            if replica.layers == layers and self.memory_on(sizes, replica.host, layers) is not None:
                self.replicas.remove(replica)
                return self.take(sizes, replica.host, layers)
        return None

    def take(self, sizes: StageSizes, host: str, layers: LayerRange) -> StagePlacement:
        """Place layers on a host, which drops as many of its replicas as it must."""
        # A plan may have counted slightly differently; then the memory without a host is used.
        memory = self.memory_on(sizes, host, layers) or sizes.memory(layers)
        self.num_stages[host] += 1
        self.left[host] = self.left[host].without(memory)
        self.dropped += (going := self._replicas_to_drop(sizes, host, self.left[host]))
        self.replicas = [replica for replica in self.replicas if replica not in going]
        return StagePlacement(host, layers, memory)

    def must_drop(self, sizes: StageSizes, host: str, layers: LayerRange) -> bool:
        """Whether the layers fit only without a replica that is there."""
        memory = self.memory_on(sizes, host, layers) or sizes.memory(layers)
        return bool(self._replicas_to_drop(sizes, host, self.left[host].without(memory)))

    def _replicas_to_drop(self, sizes: StageSizes, host: str, left: HostCapacity) -> list[Replica]:
        going = []
        for replica in self.replicas:
            if replica.host != host:
                continue
            memory = memory_on(sizes, replica.layers, left)
            if memory is not None:
                left = left.without(memory)
            else:
                going.append(replica)
        return going


def next_replica(
    sizes: StageSizes,
    stages: Sequence[StagePlacement],
    hosts: Sequence[HostCapacity],
    replicas: Collection[Replica],
) -> Replica | None:
    """The most useful replica that is missing.

    A spare, that is a host without a stage, takes replicas while its memory lasts: first of a stage with the
    fewest replicas, among those the one whose loss would cost most, that is with the most bytes to load. No
    stage gets more than two: weights cross the network for them.

    Args:
        sizes: Sizes of the model's stages.
        stages: The ring.
        hosts: All ready hosts, each with all of its memory.
        replicas: Existing replicas.

    Returns:
        None if every spare is full, or has a replica of everything.
    """
    busy = {stage.host for stage in stages}
    wanted = []
    for host in hosts:
        if host.name in busy:
            continue
        held = [replica for replica in replicas if replica.host == host.name]
        left = left_beside_replicas(sizes, host, held)
        for index, stage in enumerate(stages):
            replica = Replica(host.name, stage.layers)
            if replica in held or memory_on(sizes, stage.layers, left) is None:
                continue
            num_replicas = sum(other.layers == stage.layers for other in replicas)
            if num_replicas < _MOST_REPLICAS:
                wanted.append((num_replicas, -stage.memory.weight_bytes, index, replica))
    return min(wanted, key=lambda item: item[:3])[3] if wanted else None


def replicated_layers(
    sizes: StageSizes, stages: Sequence[StagePlacement], hosts: Sequence[HostCapacity]
) -> frozenset[LayerRange]:
    """Layers of the stages that get a replica where none exists yet.

    As `next_replica` would place them one after the other, in one pass: what finds no room finds none later.

    Args:
        sizes: Sizes of the model's stages.
        stages: The ring.
        hosts: All ready hosts, each with all of its memory.
    """
    busy = {stage.host for stage in stages}
    spares = [host for host in hosts if host.name not in busy]
    found = set()
    for stage in sorted(stages, key=lambda stage: -stage.memory.weight_bytes):
        for index, spare in enumerate(spares):
            memory = memory_on(sizes, stage.layers, spare)
            if memory is not None:
                spares[index] = spare.without(memory)
                found.add(stage.layers)
                break
    return frozenset(found)


def left_beside_replicas(sizes: StageSizes, host: HostCapacity, held: Collection[Replica]) -> HostCapacity:
    """Capacity left on a host beside its replicas.

    Args:
        sizes: Sizes of the model's stages.
        host: With all of its memory.
        held: Its replicas, in the order of loading.
    """
    for replica in held:
        host = host.without(memory_on(sizes, replica.layers, host) or sizes.memory(replica.layers))
    return host


def replan(
    sizes: StageSizes,
    stages: Sequence[StagePlacement],
    lost: Collection[int],
    hosts: Sequence[HostCapacity],
    replicas: Iterable[Replica] = (),
    *,
    may_start_over: bool = True,
    is_time_up: Callable[[], bool] = never,
) -> Replan:
    """Place lost stages.

    Each goes, in this order, to a host with a replica of it; to one host that has room for it, a spare before
    the one that had it, and that before any other; to several hosts, its layers divided. Only if one of them
    cannot be placed is the whole model placed anew.

    Args:
        sizes: Sizes of the model's stages.
        stages: The old ring.
        lost: Indices of the stages to be placed.
        hosts: Capacities of hosts, each with all of its memory, including what its stages hold.
        replicas: Replicas on the hosts.
        may_start_over: Whether surviving stages may be given up for a new plan.
        is_time_up: See `mesh.placement.planner.plan`.

    Raises:
        ModelDoesNotFit: With the memory that is needed and that each host has left.
        NotEnoughHosts: If there is no host for the lost stages.
    """
    if lost and not hosts:
        raise NotEnoughHosts("no host can take a stage: join one with `mesh join`")
    survivors = [stage for index, stage in enumerate(stages) if index not in lost]
    room = _Room(hosts, survivors, replicas, had_stages={stage.host for stage in stages})
    placed = _placed_again(sizes, [(index, stages[index]) for index in sorted(lost)], room)
    if placed is not None:
        pieces: Iterator[tuple[NewStage, ...]] = (
            placed[index] if index in placed else (NewStage(stage, kept=index),)
            for index, stage in enumerate(stages)
        )
        new = tuple(itertools.chain.from_iterable(pieces))
        return Replan(new, tuple(room.dropped), _reason(new))
    if not may_start_over:
        raise ModelDoesNotFit(_no_room([stages[index] for index in sorted(lost)], room))
    anew = plan(sizes.model, hosts, sizes.workload, is_time_up=is_time_up)
    alive = {(stage.host, stage.layers): index for index, stage in enumerate(stages) if index not in lost}
    return _start_over(sizes, anew, alive, _Room(hosts, (), replicas, had_stages=()))


def can_replan(
    sizes: StageSizes,
    stages: Sequence[StagePlacement],
    lost: Collection[int],
    hosts: Sequence[HostCapacity],
    *,
    may_start_over: bool = True,
) -> bool:
    """Whether `replan` finds a place for lost stages; in less time, since any placement suffices.

    Args:
        sizes: Sizes of the model's stages.
        stages: The old ring.
        lost: Indices of the stages to be placed.
        hosts: Capacities of hosts, each with all of its memory, including what its stages hold.
        may_start_over: Whether surviving stages may be given up for a new plan.
    """
    if not hosts:
        return False
    survivors = [stage for index, stage in enumerate(stages) if index not in lost]
    room = _Room(hosts, survivors, (), had_stages={stage.host for stage in stages})
    if _placed_again(sizes, [(index, stages[index]) for index in sorted(lost)], room) is not None:
        return True
    if not may_start_over:
        return False
    return find_assignment(StageTable(sizes), even_out_noise(hosts), None, lambda: True) is not None


def _placed_again(
    sizes: StageSizes, lost: Sequence[tuple[int, StagePlacement]], room: _Room
) -> dict[int, tuple[NewStage, ...]] | None:
    """Placements for each lost stage; None if one of them cannot be placed."""
    placed: dict[int, tuple[NewStage, ...]] = {}
    for index, stage in lost:
        placement = room.take_replica(sizes, stage.layers)
        if placement is not None:
            placed[index] = (NewStage(placement, is_replica=True),)
    # The largest first: small ones fit beside them more easily than the other way round.
    rest = sorted(
        ((index, stage) for index, stage in lost if index not in placed),
        key=lambda item: -item[1].memory.total_bytes,
    )
    for index, stage in rest:
        parts = _one_host(sizes, stage, room) or _several_hosts(sizes, stage.layers, room)
        if not parts:
            return None
        placed[index] = tuple(map(NewStage, parts))
    return placed


def _one_host(sizes: StageSizes, stage: StagePlacement, room: _Room) -> list[StagePlacement]:
    fitting = [host for host in room.hosts if room.memory_on(sizes, host, stage.layers) is not None]
    if not fitting:
        return []
    chosen = min(
        fitting,
        key=lambda host: (
            not room.is_spare(host),
            host != stage.host,
            room.must_drop(sizes, host, stage.layers),
            room.num_stages[host],
            -room.hosts[host].fastest_gb_per_s,
        ),
    )
    return [room.take(sizes, chosen, stage.layers)]


def _several_hosts(sizes: StageSizes, layers: LayerRange, room: _Room) -> list[StagePlacement]:
    """Placements on the hosts with the most memory, as few of them as suffice."""
    roomy = sorted(room.hosts, key=lambda host: -room.left[host].all_bytes)
    table = StageTable(sizes, layers)
    for count in range(2, min(len(roomy), len(table.edges) - 1) + 1):
        assignment = assign_all(table, [room.left[host] for host in roomy[:count]])
        if assignment is not None:
            parts = zip(assignment.hosts, assignment.layers, strict=True)
            return [room.take(sizes, host.name, part) for host, part in parts]
    return []


def _start_over(
    sizes: StageSizes, placed: Plan, alive: Mapping[tuple[str, LayerRange], int], room: _Room
) -> Replan:
    """A new plan, which keeps stages and replicas that are where it puts them."""
    new = []
    for stage in placed.stages:
        replica = Replica(stage.host, stage.layers)
        kept = alive.get((stage.host, stage.layers))
        is_replica = kept is None and replica in room.replicas
        if is_replica:
            room.replicas.remove(replica)
        new.append(NewStage(stage, kept, is_replica))
    for stage in placed.stages:
        room.take(sizes, stage.host, stage.layers)
    reason = f"new placement: {placed.reason}"
    return Replan(tuple(new), tuple(room.dropped), reason, starts_over=True)


def _reason(stages: Iterable[NewStage]) -> str:
    moved = [
        f"{stage.placement.layers} to {stage.placement.host}{' (had a replica)' if stage.is_replica else ''}"
        for stage in stages
        if stage.kept is None
    ]
    return "layers " + ", ".join(moved) if moved else "nothing moved"


def _no_room(stages: Iterable[StagePlacement], room: _Room) -> str:
    needed = ", ".join(
        f"layers {stage.layers} need {format_size(stage.memory.total_bytes)}" for stage in stages
    )
    free = ", ".join(map(str, room.left.values()))
    return f"no other host can hold the layers to move: {needed}; free are {free}; join more hosts"
