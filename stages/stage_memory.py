"""What a stage takes of its host's memory, and whether that is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.units import format_size

if TYPE_CHECKING:
    from stages.gpu_share import GpuShare


@dataclass(frozen=True)
class StageMemory:
    """What a stage takes, in bytes; never less than it will really take.

    Attributes:
        weight_bytes: Weights, with embedding and head where it holds them.
        cache_bytes: The KV cache, and the state of recurrent layers.
        buffer_bytes: What llama.cpp computes in, and logits.
        process_bytes: The process around it.
        gpus: What of the weights and of the cache lies on GPUs, in the order of layers. Layers before those
            are computed by the processor.
    """

    weight_bytes: int
    cache_bytes: int
    buffer_bytes: int
    process_bytes: int
    gpus: tuple[GpuShare, ...] = ()

    @property
    def total_bytes(self) -> int:
        """All that it takes of the host's own memory."""
        return self.loading_bytes + self.process_bytes

    @property
    def loading_bytes(self) -> int:
        """What of that comes on top once the process runs."""
        elsewhere = sum(
            -gpu.buffer_bytes if gpu.shares_host_memory else gpu.weight_bytes + gpu.cache_bytes
            for gpu in self.gpus
        )
        return self.weight_bytes + self.cache_bytes + self.buffer_bytes - elsewhere

    @property
    def gpu_layers(self) -> tuple[tuple[str, int], ...]:
        """Devices with how many layers each holds, as `RuntimeOptions` takes them."""
        return tuple((gpu.device, gpu.num_layers) for gpu in self.gpus)

    def __str__(self) -> str:
        on_gpus = "".join(
            f", of which {format_size(gpu.weight_bytes + gpu.cache_bytes)} on {gpu.device}"
            for gpu in self.gpus
        )
        return (
            f"{format_size(self.weight_bytes)} for weights, {format_size(self.cache_bytes)} for the KV "
            f"cache, {format_size(self.buffer_bytes)} for buffers{on_gpus}"
        )
