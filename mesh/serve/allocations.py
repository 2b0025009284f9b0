"""Allocations: memory and threads that each model takes of the hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from mesh.cluster.members import Member
    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.planner import StagePlacement
    from mesh.serve.pipeline import Pipeline
    from mesh.serve.stage_handle import StageHandle


@dataclass(frozen=True, eq=False)
class EvictableReplica:
    """A replica that gives way to another model."""

    pipeline: Pipeline
    """Pipeline of the replica."""
    replica: StageHandle
    """The replica, loaded or loading."""


class HostAllocations:
    """Allocations of all models, in the order in which the models were loaded.

    Args:
        is_head: Whether a member is the head's own host, where draft models run and texts are read.
        worker_bytes: Memory of the head's processes for texts and bodies, vocabularies aside.
    """

    def __init__(self, is_head: Callable[[Member], bool], *, worker_bytes: int = 0) -> None:
        self.is_head = is_head
        self._worker_bytes = worker_bytes
        self._allocations: list[ModelAllocation] = []

    def __iter__(self) -> Iterator[ModelAllocation]:
        return iter(tuple(self._allocations))

    def open(
        self,
        name: str,
        pipeline: Pipeline,
        *,
        draft_bytes: int = 0,
        request_bytes: int = 0,
        most_threads: int | None = None,
        computes_at_times: bool = False,
    ) -> ModelAllocation:
        """Open the allocation of a model; see `ModelAllocation`."""
        allocation = ModelAllocation(
            self,
            name,
            pipeline,
            draft_bytes=draft_bytes,
            request_bytes=request_bytes,
            most_threads=most_threads,
            computes_at_times=computes_at_times,
        )
        self._allocations.append(allocation)
        return allocation

    def close(self, allocation: ModelAllocation) -> None:
        """Remove the allocation of a model; what it held must be free by now."""
        if allocation in self._allocations:
            self._allocations.remove(allocation)

    def layers_on(self, host: str) -> str:
        """Layers held by a host, for display: of the first model, then of others by model name."""
        held = []
        for allocation in self._allocations:
            layers = ", ".join(str(stage.layers) for stage in allocation.noted if stage.host == host)
            if layers:
                held.append(self._named(allocation, layers))
        return "; ".join(held)

    def replicas_on(self, host: str) -> list[str]:
        """Replicas held by a host, for display."""
        return [
            self._named(allocation, str(replica.config.layers))
            for allocation in self._allocations
            for replica in allocation.pipeline.replicas
            if replica.member.name == host
        ]

    def held_bytes(self, member: Member, *, without: Collection[str] = ()) -> int:
        """Bytes of a host's own memory that models take, with draft models, readers of requests and replicas.

        Args:
            member: The host.
            without: Names of models that do not count.
        """
        counted = [allocation for allocation in self._allocations if allocation.name not in without]
        on_head = (
            self._worker_bytes
            + sum(allocation.draft_bytes + allocation.request_bytes for allocation in counted)
            if self.is_head(member)
            else 0
        )
        return on_head + sum(
            sum(placement.memory.total_bytes for placement in allocation.pipeline.held_on(member.name))
            + sum(
                replica.config.memory.total_bytes for replica in allocation.pipeline.replicas_on(member.name)
            )
            for allocation in counted
        )

    def capacity_without(
        self, member: Member, gone: Collection[str], *, draft_bytes: int = 0, request_bytes: int = 0
    ) -> HostCapacity:
        """Capacity of a host for a further model, once some models are unloaded; replicas give way to it.

        Args:
            member: The host.
            gone: Names of the models that are unloaded by then.
            draft_bytes: Memory of the further model's draft model, on the head.
            request_bytes: Memory of the processes that read its requests, on the head.
        """
        staying = [allocation for allocation in self._allocations if allocation.name not in gone]
        return self.capacity_beside(member, staying, draft_bytes=draft_bytes, request_bytes=request_bytes)

    def capacity_beside(
        self,
        member: Member,
        others: Sequence[ModelAllocation],
        *,
        draft_bytes: int,
        request_bytes: int,
        beside_replicas: bool = False,
    ) -> HostCapacity:
        """Capacity of a host for one model beside others.

        Args:
            member: The host.
            others: Allocations of the other models.
            draft_bytes: Memory of the model's draft model, on the head.
            request_bytes: Memory of the processes that read its requests, on the head.
            beside_replicas: Whether replicas of the others keep their memory.
        """
        host = member.facts.capacity(member.name)
        drafts = texts = 0
        if self.is_head(member):
            host = host.on_head(draft_bytes=draft_bytes, request_bytes=self._worker_bytes + request_bytes)
            drafts = sum(other.draft_bytes for other in others)
            texts = sum(other.request_bytes for other in others)
        held = []
        for other in others:
            memory = [placement.memory for placement in other.pipeline.held_on(member.name)]
            if other.computes_at_times:
                for each in memory:
                    host = host.without(each)
            else:
                held += memory
        if beside_replicas:
            held += [
                replica.config.memory
                for other in others
                for replica in other.pipeline.replicas_on(member.name)
            ]
        return host.beside(held, draft_bytes=drafts, request_bytes=texts)

    def capacity_for_stages(self, member: Member) -> HostCapacity:
        """Capacity of a host for the stages and replicas of all models together."""
        host = member.facts.capacity(member.name)
        if not self.is_head(member):
            return host
        return host.on_head(
            draft_bytes=sum(allocation.draft_bytes for allocation in self._allocations),
            request_bytes=self._worker_bytes
            + sum(allocation.request_bytes for allocation in self._allocations),
        )

    def _named(self, allocation: ModelAllocation, what: str) -> str:
        return what if allocation is self._allocations[0] else f"{allocation.name} {what}"


class ModelAllocation:
    """Memory and threads of one model, and what the other models leave for it.

    Args:
        allocations: Allocations of all models.
        name: Model name for clients.
        pipeline: Stages and replicas of the model.
        draft_bytes: Memory of its draft model, on the head.
        request_bytes: Memory of the processes that read its requests, on the head: vocabulary, projector.
        most_threads: Threads of each host for this model; None for those that no other model computes with.
        computes_at_times: Whether it leaves all threads, and the speed of its host, to the others, since it
            seldom computes.

    Attributes:
        noted: Its stages as last announced to all hosts.
        attention_version: In exact mode, what computes attention on its hosts, see
            `stages.runtime.llama_libraries`, once it has some: other hosts have no room for it.
    """

    def __init__(
        self,
        allocations: HostAllocations,
        name: str,
        pipeline: Pipeline,
        *,
        draft_bytes: int = 0,
        request_bytes: int = 0,
        most_threads: int | None = None,
        computes_at_times: bool = False,
    ) -> None:
        self.computes_at_times = computes_at_times
        self._allocations = allocations
        self.name = name
        self.pipeline = pipeline
        self.draft_bytes = draft_bytes
        self.request_bytes = request_bytes
        self._most_threads = most_threads
        self.noted: tuple[StagePlacement, ...] = ()
        self.attention_version: int | None = None

    def capacity_of(self, member: Member) -> HostCapacity:
        """Capacity of a host for this model's stages; replicas of other models give way to them."""
        return self._capacity(member, beside_replicas=False)

    def capacity_for_replicas(self, member: Member) -> HostCapacity:
        """Capacity of a host for this model's replicas, for which nothing gives way."""
        return self._capacity(member, beside_replicas=True)

    def threads_of(self, member: Member) -> int:
        """Threads of a host for all stages of this model together, at least one.

        Threads spin: two models that compute at the same time with more threads than processors slow each
        other down many times over.
        """
        if self._most_threads is not None:
            return min(self._most_threads, member.facts.num_threads)
        taken = sum(
            handle.config.options.num_threads
            for other in self._others()
            if not other.computes_at_times
            for handle in (*other.pipeline.handles, *other.pipeline.loading)
            if handle.member.name == member.name
        )
        return max(1, member.facts.num_threads - taken)

    def evictable_replicas(self, member: Member) -> tuple[EvictableReplica, ...]:
        """Replicas of other models that leave too little room on a host for the stages intended there."""
        host, allocations = member.name, tuple(self._allocations)
        left = self._allocations.capacity_for_stages(member)
        becoming = {placement.layers for placement in self.pipeline.intended if placement.host == host}
        staying = [
            replica for replica in self.pipeline.replicas_on(host) if replica.config.layers not in becoming
        ]
        for memory in (
            *(
                placement.memory
                for allocation in allocations
                for placement in allocation.pipeline.held_on(host)
            ),
            *(replica.config.memory for replica in staying),
        ):
            left = left.without(memory)
        going = []
        for other in self._others():
            for replica in other.pipeline.replicas_on(host):
                beside = left.without(replica.config.memory)
                if beside.is_overdrawn:
                    going.append(EvictableReplica(other.pipeline, replica))
                else:
                    left = beside
        return tuple(going)

    def _others(self) -> Iterator[ModelAllocation]:
        return (allocation for allocation in self._allocations if allocation is not self)

    def _capacity(self, member: Member, *, beside_replicas: bool) -> HostCapacity:
        host = self._allocations.capacity_beside(
            member,
            tuple(self._others()),
            draft_bytes=self.draft_bytes,
            request_bytes=self.request_bytes,
            beside_replicas=beside_replicas,
        )
        return host if self.attention_version is None else host.kept_to(self.attention_version)
