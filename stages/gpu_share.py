"""What of a stage lies on a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuShare:
    """Consecutive layers of a stage on one device, the head with the stage's last layer if it is the tail.

    Attributes:
        device: As llama.cpp calls it.
        num_layers: How many layers.
        weight_bytes: Their weights.
        cache_bytes: Their KV cache.
        buffer_bytes: What llama.cpp computes in there, and what the backend takes for itself.
        shares_host_memory: Whether all that is taken from the host's own memory.
    """

    device: str
    num_layers: int
    weight_bytes: int
    cache_bytes: int
    buffer_bytes: int
    shares_host_memory: bool = False

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.cache_bytes + self.buffer_bytes
