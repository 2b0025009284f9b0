"""Placement of replicas: which stages get one on a spare host, and what they leave of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mesh.placement.gpu_layers import memory_on

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.memory_estimate import StageSizes
    from mesh.placement.planner import StagePlacement
    from stages.layers import LayerRange

# Of one stage: for a second loss before the first one is recovered from.
_MOST_REPLICAS: Final = 2


@dataclass(frozen=True)
class Replica:
    """A replica: layers loaded on a spare host, ready to become a stage."""

    host: str
    """Name of the host."""
    layers: LayerRange
    """Its layers."""


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
