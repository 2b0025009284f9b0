"""Layers on GPUs: --gpu-layers and --n-cpu-moe, and how many layers each device of a host gets.

Also memory and reading time of a stage that is split over the processor and GPUs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ClusterError
from stages.layers import LayerRange
from stages.runtime.numerics import exact_reasons, verdict_on
from stages.runtime.process_memory import GpuShare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.placement.host_capacity import Gpu, HostCapacity
    from mesh.placement.memory_estimate import StageSizes
    from stages.runtime.process_memory import StageMemory

ALL: Final = -1
"""Every layer, as in llama.cpp."""
_WORDS: Final[dict[str, int | None]] = {"auto": None, "all": ALL, "none": 0}
# llama.cpp puts the last layers of a file on GPUs and leaves the first ones, and always the embedding, to the
# processor; each layer's KV cache goes with it, and the head with the last layer. So layers are given out
# from the end: to the fastest GPU as many as it has room for, then to the next.
#
# Experts are most of a mixture's weights, and few of them are read for a token, while attention reads its
# weights and cache each time. So a layer whose experts find no room leaves them to the processor, the first
# layers before later ones, and only a layer that does not fit without them stays whole.

# What a backend takes of a GPU for itself beside llama.cpp's buffers: its context, kernels, workspaces. An
# allowance, not a measurement: no GPU was at hand.
GPU_PROCESS_BYTES: Final = 384 * 2**20
# Avoids a division by zero after a failed measurement.
SLOWEST_GB_PER_S: Final = 0.01


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


def parse_cpu_moe(number: int | None, *, is_all: bool) -> int | None:
    """--n-cpu-moe and --cpu-moe as one number.

    Args:
        number: Of the model's first layers, or None if it was not given.
        is_all: Whether all layers are meant.

    Returns:
        The number, `ALL` for all, None for as few as give layers room on GPUs.

    Raises:
        ClusterError: If both are given.
    """
    if not is_all:
        return number
    if number is not None:
        raise ClusterError(
            "--cpu-moe means all layers, --n-cpu-moe some of them: leave one of the two out",
            param="--cpu-moe",
        )
    return ALL


def check_gpu_layers(wanted: int | None, gpus: Sequence[Gpu], *, is_exact: bool = False) -> None:
    """Check that the requested layers can go to GPUs.

    Args:
        wanted: Requested number of layers.
        gpus: GPUs of this host.
        is_exact: Whether the exact mode is requested.

    Raises:
        ClusterError: If layers are to go to a GPU and there is none, or none that may compute in exact mode
            where that is requested.
    """
    if not wanted:
        return
    if is_exact and not any(verdict_on(gpu.name).is_exact for gpu in gpus):
        reasons = exact_reasons(gpu.name for gpu in gpus)
        raise ClusterError(
            f"--exact computes on CPUs only here{f' ({reasons})' if reasons else ''}; --gpu-layers "
            f"{format_gpu_layers(wanted)} asks for a GPU: leave one of the two out",
            param="--gpu-layers",
        )
    if not gpus:
        raise ClusterError(
            f"--gpu-layers {format_gpu_layers(wanted)}: llama.cpp finds no GPU here; build it for one "
            "(`make environment BACKEND=vulkan`; `mesh doctor` says what is missing), or leave it out",
            param="--gpu-layers",
        )


def memory_on(sizes: StageSizes, layers: LayerRange, host: HostCapacity) -> StageMemory | None:
    """Memory of layers on a host; None if they do not fit there.

    Args:
        sizes: Sizes of the model's stages.
        layers: The layers.
        host: With the capacity left.
    """
    if sizes.workload.is_exact:
        host = host.in_exact_mode
    if not host.uses_gpus:
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
    num_cpu_moe = _num_cpu_moe(sizes, layers, host, wanted)
    shares = _shares(sizes.on_gpu, layers, host, wanted, num_cpu_moe)
    if host.gpu_layers is not None and _num_layers(shares) < wanted:
        return None
    if not shares:
        memory = sizes.memory(layers)
    else:
        memory = replace(sizes.on_gpu.memory(layers), gpus=shares, cpu_moe_layers=num_cpu_moe)
        if sizes.model.is_tied and layers == sizes.whole:
            # The processor looks tokens up in the tensor that the GPU has as head.
            memory = replace(memory, weight_bytes=memory.weight_bytes + sizes.model.embedding_bytes)
    return memory if memory.total_bytes <= host.memory_bytes else None


def _num_cpu_moe(sizes: StageSizes, layers: LayerRange, host: HostCapacity, wanted: int) -> int:
    """First layers of the stage whose experts stay with the processor.

    Unless the operator gave a number, as few as let as many of the wanted layers as possible find room.
    """
    if not sizes.model.expert_bytes:
        return 0
    if host.cpu_moe_layers == ALL:
        return len(layers)
    if host.cpu_moe_layers is not None:
        return max(0, min(host.cpu_moe_layers - layers.start, len(layers)))

    def num_on_gpus(count: int) -> int:
        return _num_layers(_shares(sizes.on_gpu, layers, host, wanted, count))

    # The more experts stay with the processor, the more layers find room.
    return bisect_left(range(len(layers) + 1), num_on_gpus(len(layers)), key=num_on_gpus)


def _num_layers(shares: Sequence[GpuShare]) -> int:
    return sum(share.num_layers for share in shares)


def _shares(
    sizes: StageSizes, layers: LayerRange, host: HostCapacity, wanted: int, num_cpu_moe: int
) -> tuple[GpuShare, ...]:
    """Layers on each GPU, in the order of layers.

    Args:
        sizes: Sizes of the model's stages, with layers on a GPU.
        layers: Layers of the stage.
        host: With its GPUs.
        wanted: Most layers on them.
        num_cpu_moe: First layers of the stage without their experts there.
    """
    without_experts = layers.start + num_cpu_moe

    def left_out_bytes(start: int, stop: int) -> int:
        return sizes.expert_bytes(start, min(stop, without_experts))

    beside_bytes = sizes.compute_bytes(layers) + GPU_PROCESS_BYTES
    shares: list[GpuShare] = []
    stop, last = layers.stop, layers.stop - wanted
    for gpu in sorted(host.gpus, key=lambda gpu: (-gpu.speed_gb_per_s, -gpu.free_bytes)):
        start = stop
        buffer_bytes = beside_bytes + (sizes.idle_head_bytes(layers) if stop == layers.stop else 0)
        while start > last and (
            sizes.layer_bytes(start - 1, stop) - left_out_bytes(start - 1, stop) + buffer_bytes
            <= gpu.free_bytes
        ):
            start -= 1
        if start < stop:
            part = LayerRange(start, stop)
            shares.append(
                GpuShare(
                    gpu.name,
                    len(part),
                    sizes.read_bytes(part) - left_out_bytes(start, stop),
                    sizes.cache_bytes(part),
                    buffer_bytes,
                    gpu.shares_host_memory,
                )
            )
            stop = start
    return tuple(reversed(shares))
