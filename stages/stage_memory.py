"""What a stage takes of its host's memory, and whether that is there."""

from __future__ import annotations

from dataclasses import dataclass

from stages.byte_size import format_size


@dataclass(frozen=True)
class StageMemory:
    """What a stage takes, in bytes; never less than it will really take.

    Attributes:
        weight_bytes: Weights, with embedding and head where it holds them.
        cache_bytes: The KV cache.
        buffer_bytes: What llama.cpp computes in, and logits.
        process_bytes: The process around it.
    """

    weight_bytes: int
    cache_bytes: int
    buffer_bytes: int
    process_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.loading_bytes + self.process_bytes

    @property
    def loading_bytes(self) -> int:
        """What comes on top once the process runs."""
        return self.weight_bytes + self.cache_bytes + self.buffer_bytes

    def __str__(self) -> str:
        return (
            f"{format_size(self.weight_bytes)} for weights, {format_size(self.cache_bytes)} for the KV "
            f"cache, {format_size(self.buffer_bytes)} for buffers"
        )
