"""A GPU of a host, as far as planning and the operator care."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One device that layers can go to.

    Attributes:
        name: As llama.cpp calls it, such as `CUDA0`.
        description: For people.
        free_bytes: Of its memory.
        total_bytes: Of its memory.
        speed_gb_per_s: How fast it reads weights.
        shares_host_memory: Whether what it holds is taken from the host's own memory.
    """

    name: str
    description: str
    free_bytes: int
    total_bytes: int
    speed_gb_per_s: float
    shares_host_memory: bool = False
