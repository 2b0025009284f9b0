"""Host of an encoder of pictures: memory that the projector takes there, and the choice among hosts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from mesh.placement.gpu_layers import GPU_PROCESS_BYTES
from mesh.placement.memory_estimate import PROCESS_BYTES
from mesh.placement.one_host import memory_on_one, place_on_one
from spanmesh_proto.errors import NotEnoughHosts
from stages.layers import LayerRange
from stages.runtime.process_memory import GpuShare, StageMemory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.planner import Plan

AUTO_HOST: Final = "auto"
"""A host with a GPU for it if there is one, else the head."""
OWN_HOST: Final = "head"
"""A process of the head."""


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes of a projector."""

    path: Path
    """Its file."""
    n_layers: int
    """Its layers."""
    weight_bytes: int
    """Its weights."""
    compute_bytes: int
    """What is computed of a picture."""
    process_bytes: int
    """The rest of its processes on a host, Ray's included."""
    is_measured: bool = False
    """Whether what is computed was measured."""

    @property
    def name(self) -> str:
        """Name of its file."""
        return self.path.name

    @property
    def layers(self) -> LayerRange:
        """All layers."""
        return LayerRange(0, self.n_layers)

    @property
    def head_bytes(self) -> int:
        """Memory of the head's process, which Ray does not start."""
        return self.memory.total_bytes - PROCESS_BYTES

    @cached_property
    def memory(self) -> StageMemory:
        """Memory on a host's processor."""
        return StageMemory(self.weight_bytes, 0, self.compute_bytes, self.process_bytes)

    def memory_on(self, host: HostCapacity) -> StageMemory | None:
        """Memory on a host; None if it does not fit."""
        buffers = self.compute_bytes + GPU_PROCESS_BYTES
        return memory_on_one(host, self.memory, GpuShare("", self.n_layers, self.weight_bytes, 0, buffers))


def place_encoder(sizes: EncoderSizes, hosts: Sequence[HostCapacity], wanted: str) -> Plan:
    """The host for an encoder besides the head's own process, which computes on processors.

    Args:
        sizes: Sizes of the projector.
        hosts: Capacities, in the order in which the hosts joined.
        wanted: Name of the host that is preferred, or `AUTO_HOST`. While it is not there, or is too small,
            others take its place.

    Returns:
        A plan of one stage: the preferred host, else the best one with a GPU for it.

    Raises:
        NotEnoughHosts: If there is none of these: the head is the best place.
    """
    found = [(host, sizes.memory_on(host)) for host in hosts]
    named = [(host, memory) for host, memory in found if host.name == wanted and memory is not None]
    with_gpus = [(host, memory) for host, memory in found if memory is not None and memory.gpus]
    if not named and not with_gpus:
        place = "" if wanted == AUTO_HOST else f"{wanted} is not there or has too little memory, and "
        raise NotEnoughHosts(
            f"{place}no host has a GPU with room for {sizes.name}: the head encodes pictures"
        )
    return place_on_one(
        sizes.name,
        sizes.layers,
        sizes.memory,
        named or with_gpus,
        what="the encoder of pictures",
        remedy="join a host with more memory",
    )
