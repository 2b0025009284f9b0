"""Choice of the one host for what is not cut: an embedding model, or the projector of pictures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mesh.placement.gpu_layers import ALL
from mesh.placement.planner import SPEED_NOISE, Plan, StagePlacement
from spanmesh_proto.errors import ModelDoesNotFit, NotEnoughHosts
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.placement.host_capacity import HostCapacity
    from stages.layers import LayerRange
    from stages.runtime.process_memory import GpuShare, StageMemory


def memory_on_one(host: HostCapacity, memory: StageMemory, share: GpuShare) -> StageMemory | None:
    """Memory of all layers on a host: on one of its GPUs if they fit there, else on the processor.

    Args:
        host: With the capacity left.
        memory: Memory on the processor alone.
        share: What a GPU takes, of whatever name.

    Returns:
        None if they do not fit.
    """
    wanted = share.num_layers if host.gpu_layers in {None, ALL} else host.gpu_layers or 0
    if host.uses_gpus and wanted >= share.num_layers:
        for gpu in sorted(host.gpus, key=lambda gpu: (-gpu.speed_gb_per_s, -gpu.free_bytes)):
            found = replace(share, device=gpu.name, shares_host_memory=gpu.shares_host_memory)
            on_gpu = replace(memory, gpus=(found,))
            if found.total_bytes <= gpu.free_bytes and on_gpu.total_bytes <= host.memory_bytes:
                return on_gpu
    return memory if memory.total_bytes <= host.memory_bytes else None


def place_on_one(
    name: str,
    layers: LayerRange,
    memory: StageMemory,
    hosts: Sequence[tuple[HostCapacity, StageMemory | None]],
    *,
    what: str,
    remedy: str,
) -> Plan:
    """The best of some hosts: with a GPU for it, else a fast one, with the most memory left.

    Args:
        name: Name of what is placed, for messages.
        layers: All of its layers.
        memory: Its memory on a processor.
        hosts: Capacities, in the order in which the hosts joined, with its memory there; None if it does not
            fit.
        what: What the host holds, for the plan's reason.
        remedy: What to do if it fits nowhere.

    Returns:
        A plan of one stage.

    Raises:
        NotEnoughHosts: If there is no host.
        ModelDoesNotFit: With the memory that is needed and that each host has left.
    """
    if not hosts:
        raise NotEnoughHosts(
            f"no host can hold {name}: none is ready; see `mesh status`, or join one with `mesh join`"
        )
    fitting = [(host, found) for host, found in hosts if found is not None]
    if not fitting:
        free = ", ".join(str(host) for host, _ in hosts)
        raise ModelDoesNotFit(
            f"{name} does not fit on one host: it needs {format_size(memory.total_bytes)} ({memory}); free "
            f"are {free}; {remedy}"
        )
    if any(found.gpus for _, found in fitting):
        fitting = [(host, found) for host, found in fitting if found.gpus]
    least = max(_speed(host, found) for host, found in fitting) / (1 + SPEED_NOISE)
    quick = [(host, found) for host, found in fitting if _speed(host, found) >= least]
    host, best = max(quick, key=lambda found: found[0].memory_bytes)
    where = f"the {best.gpus[0].device} of {host.name}" if best.gpus else host.name
    return Plan((StagePlacement(host.name, layers, best),), f"{where} holds {what}")


def _speed(host: HostCapacity, memory: StageMemory) -> float:
    return host.fastest_gb_per_s if memory.gpus else host.speed_gb_per_s
