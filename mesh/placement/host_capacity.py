"""Host capacity: memory, speed and GPUs that a host offers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from stages.runtime.llama_libraries import attention_name
from stages.runtime.numerics import verdict_on
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from stages.runtime.process_memory import StageMemory


@dataclass(frozen=True)
class HostCapacity:
    """Memory, speed and GPUs of one host for one model."""

    name: str
    """Name of the host."""
    memory_bytes: int
    """Its own memory for stages."""
    speed_gb_per_s: float
    """Speed at which its processor reads weights."""
    draft_bytes: int = 0
    """Memory of a draft model besides, for messages."""
    request_bytes: int = 0
    """Memory of processes that read requests besides, for messages."""
    gpus: tuple[Gpu, ...] = ()
    """Its GPUs, each with the memory for stages."""
    gpu_layers: int | None = None
    """Layers of each stage on GPUs; None for as many as fit, see `mesh.placement.gpu_layers`."""
    others_bytes: int = 0
    """Memory held by other models besides, for messages."""
    cpu_moe_layers: int | None = None
    """First layers of the model whose experts stay with the processor; None for as few as give layers room on
    GPUs."""
    attention_version: int = 0
    """What computes attention on its processor, see `stages.runtime.llama_libraries`."""
    is_apart: bool = False
    """Whether it may not compute this model, since attention is computed otherwise on its hosts."""

    @cached_property
    def kind(self) -> HostCapacity:
        """The same without what does not matter for a plan: equal for interchangeable hosts."""
        return replace(self, name="", draft_bytes=0, request_bytes=0, others_bytes=0)

    @property
    def uses_gpus(self) -> bool:
        """Whether layers go to GPUs at all."""
        return bool(self.gpus) and self.gpu_layers != 0

    @cached_property
    def in_exact_mode(self) -> HostCapacity:
        """The same with those GPUs only that may compute in exact mode."""
        if not self.gpus:
            return self
        return replace(self, gpus=tuple(gpu for gpu in self.gpus if verdict_on(gpu.name).is_exact))

    def kept_to(self, attention_version: int) -> HostCapacity:
        """The same, without any room if attention is computed otherwise there.

        Args:
            attention_version: What computes attention on the hosts of a model in exact mode.
        """
        if self.attention_version == attention_version:
            return self
        return replace(self, memory_bytes=0, gpus=(), is_apart=True)

    @property
    def fastest_gb_per_s(self) -> float:
        """Its highest speed of reading weights, on processor or GPU."""
        return max([self.speed_gb_per_s, *(gpu.speed_gb_per_s for gpu in self.gpus if self.uses_gpus)])

    @property
    def all_bytes(self) -> int:
        """All of its memory for stages."""
        return self.memory_bytes + sum(
            gpu.free_bytes for gpu in self.gpus if self.uses_gpus and not gpu.shares_host_memory
        )

    def at_speed(self, fastest_gb_per_s: float) -> HostCapacity:
        """The same host, slower or faster as a whole."""
        if not self.uses_gpus:
            return replace(self, speed_gb_per_s=fastest_gb_per_s)
        factor = fastest_gb_per_s / self.fastest_gb_per_s
        gpus = tuple(replace(gpu, speed_gb_per_s=gpu.speed_gb_per_s * factor) for gpu in self.gpus)
        return replace(self, speed_gb_per_s=self.speed_gb_per_s * factor, gpus=gpus)

    def divided(self, count: int) -> HostCapacity:
        """Its share for each of so many stages."""
        gpus = tuple(replace(gpu, free_bytes=gpu.free_bytes // count) for gpu in self.gpus)
        return replace(self, memory_bytes=self.memory_bytes // count, gpus=gpus)

    def without(self, memory: StageMemory) -> HostCapacity:
        """Capacity left beside a stage; below zero if the stage took more than there was."""
        taken = {share.device: share.total_bytes for share in memory.gpus}
        gpus = tuple(replace(gpu, free_bytes=gpu.free_bytes - taken.get(gpu.name, 0)) for gpu in self.gpus)
        return replace(self, memory_bytes=self.memory_bytes - memory.total_bytes, gpus=gpus)

    def on_head(self, *, draft_bytes: int = 0, request_bytes: int = 0) -> HostCapacity:
        """Capacity left by what a model takes on the head's host besides its stages.

        Args:
            draft_bytes: Memory of its draft model; where it is is unknown, so it counts everywhere.
            request_bytes: Memory of processes that read requests, in the host's own memory.
        """
        return replace(
            self.reduced(draft_bytes=draft_bytes, request_bytes=request_bytes),
            draft_bytes=draft_bytes,
            request_bytes=request_bytes,
        )

    def beside(
        self, held: Collection[StageMemory], *, draft_bytes: int = 0, request_bytes: int = 0
    ) -> HostCapacity:
        """Capacity left for one model beside others.

        All models share the memory's bandwidth: each of their stages slows the host down.

        Args:
            held: Memory of their stages.
            draft_bytes: Memory of their draft models; where they are is unknown, so it counts everywhere.
            request_bytes: Memory of processes that read their requests.
        """
        if not held and not draft_bytes and not request_bytes:
            return self
        left = self.at_speed(self.fastest_gb_per_s / (1 + len(held)))
        for memory in held:
            left = left.without(memory)
        return replace(
            left.reduced(draft_bytes=draft_bytes, request_bytes=request_bytes),
            others_bytes=sum(memory.total_bytes for memory in held) + draft_bytes + request_bytes,
        )

    def reduced(self, *, draft_bytes: int, request_bytes: int) -> HostCapacity:
        """Capacity left by draft models, wherever they are, and by readers of requests, on the host."""
        gpus = tuple(
            replace(
                gpu,
                free_bytes=max(
                    0, gpu.free_bytes - draft_bytes - (request_bytes if gpu.shares_host_memory else 0)
                ),
            )
            for gpu in self.gpus
        )
        return replace(self, memory_bytes=max(0, self.memory_bytes - draft_bytes - request_bytes), gpus=gpus)

    @property
    def is_overdrawn(self) -> bool:
        """Whether more was taken than there was."""
        return self.memory_bytes < 0 or any(gpu.free_bytes < 0 for gpu in self.gpus)

    def __str__(self) -> str:
        if self.is_apart:
            return (
                f"nothing on {self.name} (--exact: attention is computed by"
                f" {attention_name(self.attention_version)} there, unlike on the model's other hosts)"
            )
        on_gpus = "".join(
            f" and {format_size(max(0, gpu.free_bytes))} on its {gpu.name}"
            for gpu in self.gpus
            if self.uses_gpus
        )
        draft = f" beside {format_size(self.draft_bytes)} for the draft model" if self.draft_bytes else ""
        texts = (
            f" beside {format_size(self.request_bytes)} for reading texts and pictures"
            if self.request_bytes
            else ""
        )
        others = f" beside {format_size(self.others_bytes)} of other models" if self.others_bytes else ""
        return f"{format_size(max(0, self.memory_bytes))} on {self.name}{on_gpus}{draft}{texts}{others}"


@dataclass(frozen=True)
class Gpu:
    """One device that layers can go to."""

    name: str
    """As llama.cpp calls it, such as `CUDA0`."""
    description: str
    """Name for display."""
    free_bytes: int
    """Free memory."""
    total_bytes: int
    """All of its memory."""
    speed_gb_per_s: float
    """Speed at which it reads weights."""
    shares_host_memory: bool = False
    """Whether its memory is the host's own."""


def in_one_kind(hosts: Sequence[HostCapacity]) -> tuple[HostCapacity, ...]:
    """Hosts for a model in exact mode: only those with room that compute attention alike.

    Of several kinds, those that together have most room.
    """
    room: Counter[int] = Counter()
    for host in hosts:
        room[host.attention_version] += host.all_bytes
    kept = max(room, key=lambda version: (room[version], version), default=0)
    return tuple(host.kept_to(kept) for host in hosts)
