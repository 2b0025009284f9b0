"""What a stage takes of one host, its layers shared out between processor and GPUs. Pure.

llama.cpp puts the last layers of a file on GPUs and leaves the first ones, and always the embedding, to the
processor; each layer's KV cache goes with it, and the head with the last layer. So layers are given out from
the end: to the fastest GPU as many as it has room for, then to the next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from mesh.gpu_layers import ALL
from stages.layers import LayerRange
from stages.runtime.memory import GpuShare

if TYPE_CHECKING:
    from mesh.host_capacity import HostCapacity
    from mesh.stage_sizes import StageSizes
    from stages.runtime.memory import StageMemory

# What a backend takes of a GPU for itself beside llama.cpp's buffers: its context, kernels, workspaces. An
# allowance, not a measurement: no GPU was at hand.
GPU_PROCESS_BYTES: Final = 384 * 2**20
# A measurement of nothing must not divide by nothing.
SLOWEST_GB_PER_S: Final = 0.01


def memory_on(sizes: StageSizes, layers: LayerRange, host: HostCapacity) -> StageMemory | None:
    """What layers take of a host; None if they find no room there.

    Args:
        sizes: Of the model's stages.
        layers: Which.
        host: With what is left of it.
    """
    if not host.uses_gpus or sizes.workload.is_exact:
        memory = sizes.memory(layers)
        return memory if memory.total_bytes <= host.memory_bytes else None
    asked = layers, host.kind
    if asked not in sizes.placed:
        sizes.placed[asked] = _with_gpus(sizes, layers, host)
    return sizes.placed[asked]


def read_time(sizes: StageSizes, layers: LayerRange, memory: StageMemory, host: HostCapacity) -> float:
    """How long a host needs to read a stage's weights, in nanoseconds.

    Args:
        sizes: Of the model's stages.
        layers: Of the stage.
        memory: What it takes of the host.
        host: With its speeds.
    """
    speeds = {gpu.name: gpu.speed_gb_per_s for gpu in host.gpus}
    on_gpus = sum(share.weight_bytes for share in memory.gpus)
    at_once = (sizes.read_bytes(layers) - on_gpus) / max(host.speed_gb_per_s, SLOWEST_GB_PER_S)
    return at_once + sum(
        share.weight_bytes / max(speeds.get(share.device, 0.0), SLOWEST_GB_PER_S) for share in memory.gpus
    )


def _with_gpus(sizes: StageSizes, layers: LayerRange, host: HostCapacity) -> StageMemory | None:
    wanted = len(layers) if host.gpu_layers in {None, ALL} else min(host.gpu_layers or 0, len(layers))
    shares = _shares(sizes.on_gpu, layers, host, wanted)
    if host.gpu_layers is not None and sum(share.num_layers for share in shares) < wanted:
        return None
    if not shares:
        memory = sizes.memory(layers)
    else:
        memory = replace(sizes.on_gpu.memory(layers), gpus=shares)
        if sizes.model.is_tied and layers == sizes.whole:
            # The processor looks tokens up in what the GPU has as head.
            memory = replace(memory, weight_bytes=memory.weight_bytes + sizes.model.embedding_bytes)
    return memory if memory.total_bytes <= host.memory_bytes else None


def _shares(sizes: StageSizes, layers: LayerRange, host: HostCapacity, wanted: int) -> tuple[GpuShare, ...]:
    """What each GPU holds, in the order of layers."""
    buffer_bytes = sizes.compute_bytes(layers) + GPU_PROCESS_BYTES
    shares: list[GpuShare] = []
    stop, last = layers.stop, layers.stop - wanted
    for gpu in sorted(host.gpus, key=lambda gpu: (-gpu.speed_gb_per_s, -gpu.free_bytes)):
        start = stop
        while start > last and sizes.layer_bytes(start - 1, stop) + buffer_bytes <= gpu.free_bytes:
            start -= 1
        if start < stop:
            part = LayerRange(start, stop)
            shares.append(
                GpuShare(
                    gpu.name,
                    len(part),
                    sizes.read_bytes(part),
                    sizes.cache_bytes(part),
                    buffer_bytes,
                    gpu.shares_host_memory,
                )
            )
            stop = start
    return tuple(reversed(shares))
