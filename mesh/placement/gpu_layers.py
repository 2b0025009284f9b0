"""Layers on GPUs: --gpu-layers, and how many layers each device of a host gets.

Also memory and reading time of a stage that is split over the processor and GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ClusterError
from stages.layers import LayerRange
from stages.runtime.process_memory import GpuShare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.placement.host_capacity import Gpu, HostCapacity
    from mesh.placement.memory_estimate import StageSizes
    from stages.runtime.process_memory import StageMemory

ALL: Final = -1
"""Every layer, as in llama.cpp."""

_WORDS: Final[dict[str, int | None]] = {"auto": None, "all": ALL, "none": 0}


def parse_gpu_layers(text: str) -> int | None:
    """Parse a number, `all`, `none` or `auto`.

    Returns:
        The number, `ALL` for all, None for as many as fit.

    Raises:
        ClusterError: If it is none of these.
    """
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    if not word.isdecimal():
        raise ClusterError(f"{text!r} is not a number of layers; write one, or all, none or auto")
    return int(word)


def format_gpu_layers(wanted: int | None) -> str:
    """The option as an operator would write it."""
    return next((word for word, number in _WORDS.items() if number == wanted), str(wanted))


def check_gpu_layers(wanted: int | None, gpus: Sequence[Gpu], *, is_exact: bool = False) -> None:
    """Check that the requested layers can go to GPUs.

    Args:
        wanted: Requested number of layers.
        gpus: GPUs of this host.
        is_exact: Whether the exact mode is requested.

    Raises:
        ClusterError: If layers are to go to a GPU and there is none, or the exact mode is requested as well.
    """
    if not wanted:
        return
    if is_exact:
        raise ClusterError(
            f"--exact computes on CPUs only, where it is measured; --gpu-layers "
            f"{format_gpu_layers(wanted)} asks for a GPU: leave one of the two out",
            param="--gpu-layers",
        )
    if not gpus:
        raise ClusterError(
            f"--gpu-layers {format_gpu_layers(wanted)}: llama.cpp finds no GPU here; build it for one "
            "(CMAKE_ARGS='-DGGML_CUDA=ON' pip install --no-binary llama-cpp-python llama-cpp-python), or "
            "leave it out",
            param="--gpu-layers",
        )


# llama.cpp puts the last layers of a file on GPUs and leaves the first ones, and always the embedding, to the
# processor; each layer's KV cache goes with it, and the head with the last layer. So layers are given out
# from the end: to the fastest GPU as many as it has room for, then to the next.

# What a backend takes of a GPU for itself beside llama.cpp's buffers: its context, kernels, workspaces. An
# allowance, not a measurement: no GPU was at hand.
GPU_PROCESS_BYTES: Final = 384 * 2**20
# Avoids a division by zero after a failed measurement.
SLOWEST_GB_PER_S: Final = 0.01


def memory_on(sizes: StageSizes, layers: LayerRange, host: HostCapacity) -> StageMemory | None:
    """Memory of layers on a host; None if they do not fit there.

    Args:
        sizes: Sizes of the model's stages.
        layers: The layers.
        host: With the capacity left.
    """
    if not host.uses_gpus or sizes.workload.is_exact:
        memory = sizes.memory(layers)
        return memory if memory.total_bytes <= host.memory_bytes else None
    asked = layers, host.kind
    if asked not in sizes.placed:
        sizes.placed[asked] = _with_gpus(sizes, layers, host)
    return sizes.placed[asked]


def read_time(sizes: StageSizes, layers: LayerRange, memory: StageMemory, host: HostCapacity) -> float:
    """Time for a host to read a stage's weights, in nanoseconds.

    Args:
        sizes: Sizes of the model's stages.
        layers: Layers of the stage.
        memory: Its memory on the host.
        host: With its speeds.
    """
    speeds = {gpu.name: gpu.speed_gb_per_s for gpu in host.gpus}
    on_gpus = sum(share.weight_bytes for share in memory.gpus)
    at_once = (sizes.read_bytes(layers) - on_gpus) / max(host.speed_gb_per_s, SLOWEST_GB_PER_S)
    return at_once + sum(
        share.weight_bytes / max(speeds.get(share.device, 0.0), SLOWEST_GB_PER_S) for share in memory.gpus
    )


def resized(sizes: StageSizes, layers: LayerRange, memory: StageMemory) -> StageMemory:
    """Memory of a stage under another workload, each layer on the device where it is.

    Args:
        sizes: Sizes of the model's stages under that workload.
        layers: Layers of the stage.
        memory: Its memory under the former workload.
    """
    if not memory.gpus:
        return sizes.memory(layers)
    on_gpu = sizes.on_gpu
    buffer_bytes = on_gpu.compute_bytes(layers) + GPU_PROCESS_BYTES
    shares: list[GpuShare] = []
    stop = layers.stop
    for share in reversed(memory.gpus):
        part = LayerRange(stop - share.num_layers, stop)
        shares.append(replace(share, cache_bytes=on_gpu.cache_bytes(part), buffer_bytes=buffer_bytes))
        stop = part.start
    return replace(on_gpu.memory(layers), weight_bytes=memory.weight_bytes, gpus=tuple(reversed(shares)))


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
            # The processor looks tokens up in the tensor that the GPU has as head.
            memory = replace(memory, weight_bytes=memory.weight_bytes + sizes.model.embedding_bytes)
    return memory if memory.total_bytes <= host.memory_bytes else None


def _shares(sizes: StageSizes, layers: LayerRange, host: HostCapacity, wanted: int) -> tuple[GpuShare, ...]:
    """Layers on each GPU, in the order of layers."""
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
