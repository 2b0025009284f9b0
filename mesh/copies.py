"""Which stage a spare host should load ahead. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.offload import memory_on
from mesh.replanner import Copy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mesh.host_capacity import HostCapacity
    from mesh.planner import StagePlacement
    from mesh.stage_sizes import StageSizes

# Of one stage: for a second loss before the first is made good.
_MOST_COPIES: Final = 2


def next_copy(
    sizes: StageSizes,
    stages: Sequence[StagePlacement],
    hosts: Sequence[HostCapacity],
    copies: Collection[Copy],
) -> Copy | None:
    """The copy most worth having that nobody has yet.

    A spare, that is a host without a stage, takes copies for as long as its memory lasts: first of a stage
    of which there are fewest copies, of those the one whose loss would cost most, which is the one with the
    most bytes to load. Nothing is copied more than twice: weights cross the network for it.

    Args:
        sizes: Of the model's stages.
        stages: The ring as it is.
        hosts: All that are ready, each with all the memory that it gives.
        copies: Those that there are.

    Returns:
        None if every spare is full, or has a copy of everything.
    """
    busy = {stage.host for stage in stages}
    wanted = []
    for host in hosts:
        if host.name in busy:
            continue
        held = [copy for copy in copies if copy.host == host.name]
        left = left_beside(sizes, host, held)
        for index, stage in enumerate(stages):
            copy = Copy(host.name, stage.layers)
            if copy in held or memory_on(sizes, stage.layers, left) is None:
                continue
            num_copies = sum(other.layers == stage.layers for other in copies)
            if num_copies < _MOST_COPIES:
                wanted.append((num_copies, -stage.memory.weight_bytes, index, copy))
    return min(wanted, key=lambda item: item[:3])[3] if wanted else None


def left_beside(sizes: StageSizes, host: HostCapacity, held: Collection[Copy]) -> HostCapacity:
    """What a host has left beside copies.

    Args:
        sizes: Of the model's stages.
        host: With all that it gives.
        held: Its copies, in the order in which they were loaded.
    """
    for copy in held:
        host = host.without(memory_on(sizes, copy.layers, host) or sizes.memory(copy.layers))
    return host
