"""Reconfiguration of a pipeline: execution of a replan, and cutover to a new ring."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, Protocol

import structlog

from mesh.placement.memory_estimate import StageSizes
from mesh.placement.replanner import Replica, replan
from mesh.serve.pipeline import PipelineStage, load_all, wire_up
from mesh.serve.planning import is_room_as_before, settled_plan
from mesh.serve.stage_handle import new_ring_credentials
from mesh.util.tasks import first_of
from spanmesh_proto.errors import ClusterError, StageFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from mesh.cluster.members import Member, Members
    from mesh.coordinator.coordinator import Coordinator
    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.planner import StagePlacement
    from mesh.placement.replanner import NewStage, Replan
    from mesh.placement.topology import Topology
    from mesh.serve.allocations import EvictableReplica, ModelAllocation
    from mesh.serve.failures import Incidents, OnFailure
    from mesh.serve.head import Head
    from mesh.serve.pipeline import OnStageError, Pipeline
    from mesh.serve.preflight import Preflight
    from mesh.serve.stage_handle import StageHandle
    from spanmesh_proto.errors import MeshError
    from stages.layers import LayerRange
    from stages.runtime.process_memory import StageMemory
    from stages.transport.hidden_codec import HiddenType

log = structlog.get_logger()


class Maker(Protocol):
    """Maker of a model's stages; see `mesh.serve.stage_factory.StageMaker`."""

    async def describe(self, stages: Iterable[tuple[str, LayerRange]]) -> None:
        """Prepare what hosts fetch for stages, by host name and layers."""

    def make(
        self,
        placement: StagePlacement,
        member: Member,
        *,
        wire: HiddenType,
        num_threads: int,
        beside: Sequence[StageMemory] = (),
    ) -> StageHandle:
        """A stage that was prepared; its process is not started."""


class PlacementExecutor:
    """Loads the stages of a placement.

    Args:
        maker: Makes stages.
        allocation: Memory and threads of the model, and what hosts have left for it.
        members: Hosts.
    """

    def __init__(self, maker: Maker, allocation: ModelAllocation, members: Members) -> None:
        self._maker = maker
        self._allocation = allocation
        self._pipeline = allocation.pipeline
        self._members = members

    async def load_stages(
        self,
        decision: Replan,
        wires: Sequence[HiddenType],
        on_stage_error: OnStageError,
    ) -> tuple[PipelineStage, ...]:
        """Load all stages of the new ring.

        After a failure the loaded stages remain as replicas, for the next attempt. Promoted replicas are
        replicas again.

        Args:
            decision: The replan.
            wires: Format of hidden states behind each of its stages.
            on_stage_error: Called with each stage that failed to load, and the error.

        Returns:
            Places of the new ring; the pipeline keeps the old ring.

        Raises:
            MeshError: If a host or a process is gone, has too little memory, or does not answer.
        """
        pipeline = self._pipeline
        pipeline.intend(decision)
        fresh: dict[int, StageHandle] = {}
        promoted: list[StageHandle] = []
        try:
            await self._evict_replicas(decision)
            await self._maker.describe(
                (new.placement.host, new.placement.layers) for new in decision.stages if _is_new(new)
            )
            fresh = self._new_stages(decision, wires)
            pipeline.loading = tuple(fresh.values())
            await first_of(load_all(pipeline.loading, on_stage_error), self._watch(pipeline.loading))
            return tuple(
                PipelineStage(new.placement, wire, fresh.get(index) or self._kept_stage(new, promoted))
                for index, (new, wire) in enumerate(zip(decision.stages, wires, strict=True))
            )
        except BaseException:
            pipeline.replicas += promoted
            for handle in fresh.values():
                if handle.is_loaded:
                    pipeline.replicas.append(handle)
                else:
                    handle.kill()
            pipeline.intended = ()
            raise
        finally:
            pipeline.loading = ()

    async def _watch(self, handles: Sequence[StageHandle]) -> NoReturn:
        """Raise when a host with a stage that is loading leaves: its processes may be unreachable."""
        while True:
            nodes = {member.ray_node_name for member in self._members}
            for handle in handles:
                if handle.member.ray_node_name not in nodes:
                    raise StageFailed(f"{handle.who} cannot be loaded: its host left")
            await self._members.changed()

    def _kept_stage(self, new: NewStage, promoted: list[StageHandle]) -> StageHandle | None:
        """The stage that the ring has, or a replica, which is appended to those that were promoted."""
        if new.kept is not None:
            return self._pipeline.stages[new.kept].handle
        promoted.append(self._pipeline.promote_replica(Replica(new.placement.host, new.placement.layers)))
        return promoted[-1]

    def _new_stages(self, decision: Replan, wires: Sequence[HiddenType]) -> dict[int, StageHandle]:
        """Stages to be loaded, by their index in the ring."""
        members = {member.name: member for member in self._members}
        staying = Counter[str]()
        sharing = Counter[str]()
        for new in decision.stages:
            host = new.placement.host
            if new.kept is not None:
                handle = self._pipeline.stages[new.kept].handle
                staying[host] += 0 if handle is None else handle.config.options.num_threads
            elif _is_new(new):
                sharing[host] += 1
        fresh = {}
        for index, (new, wire) in enumerate(zip(decision.stages, wires, strict=True)):
            if not _is_new(new):
                continue
            member = _present(members, new)
            host = member.name
            fresh[index] = self._maker.make(
                new.placement,
                member,
                wire=wire,
                # Threads spin: the stages of one host share the threads that no model uses.
                num_threads=max(1, (self._allocation.threads_of(member) - staying[host]) // sharing[host]),
                beside=[
                    other.placement.memory
                    for other in decision.stages
                    if other is not new and other.placement.host == host and _is_new(other)
                ],
            )
        return fresh

    async def _evict_replicas(self, decision: Replan) -> None:
        """End replicas whose memory is needed, and wait until it is free."""
        pipeline = self._pipeline
        going: list[StageHandle] = []
        try:
            for replica in decision.dropped:
                handle = pipeline.promote_replica(replica)
                going.append(handle)
            if decision.starts_over:
                kept = {new.kept for new in decision.stages}
                given_up = [stage for index, stage in enumerate(pipeline.stages) if index not in kept]
                going += [stage.handle for stage in given_up if stage.handle is not None]
                pipeline.stages = tuple(
                    replace(stage, handle=None) if stage in given_up else stage for stage in pipeline.stages
                )
            for evictable in self._of_other_models(decision):
                log.info(
                    "replica_gives_way",
                    host=evictable.replica.member.name,
                    layers=str(evictable.replica.config.layers),
                )
                evictable.pipeline.release(evictable.replica)
                if evictable.replica.is_loaded:
                    going.append(evictable.replica)
                else:
                    evictable.replica.kill()
            await asyncio.gather(*(handle.stop() for handle in going))
        finally:
            # After a failure or a cancellation, too: they are in no list any more.
            for handle in going:
                handle.kill()

    def _of_other_models(self, decision: Replan) -> list[EvictableReplica]:
        hosts = {new.placement.host for new in decision.stages if _is_new(new)}
        return [
            evictable
            for member in self._members
            if member.name in hosts
            for evictable in self._allocation.evictable_replicas(member)
        ]


class RingCutover:
    """Cutover from one ring to another.

    Args:
        pipeline: Its places become the new ring.
        coordinator: Coordinator whose sessions replay in the new ring.
        term: Term of the head.
        on_plan: Called with the new placement and its reason.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        coordinator: Coordinator,
        term: int,
        on_plan: Callable[[Sequence[StagePlacement], str], None],
    ) -> None:
        self._pipeline = pipeline
        self._coordinator = coordinator
        self._term = term
        self._on_plan = on_plan
        self._ending: set[asyncio.Task[None]] = set()

    async def cut_over(
        self,
        stages: tuple[PipelineStage, ...],
        reason: str,
        on_stage_error: Callable[[StageHandle, MeshError], None],
    ) -> None:
        """Switch to another ring whose stages are all loaded.

        Args:
            stages: Places of the new ring. The pipeline's from now on, even if this fails.
            reason: For the log and the status.
            on_stage_error: See `wire_up`.

        Raises:
            MeshError: If a stage is gone or unreachable; sessions stay suspended.
        """
        before = self._pipeline.handles
        self._pipeline.stages, self._pipeline.intended = stages, ()
        after = self._pipeline.handles
        self._coordinator.pause(reason)
        try:
            credentials = new_ring_credentials(self._term)
            addresses = await wire_up(stages, credentials, on_stage_error)
            self._pipeline.credentials = credentials
            await self._coordinator.reconnect(addresses, credentials.mesh_id, credentials.mesh_key)
        finally:
            for handle in before:
                if handle not in after:
                    self._end(handle)
        self._on_plan(self._pipeline.placements, reason)

    def _end(self, handle: StageHandle) -> None:
        """End a stage in the background: nothing depends on it any more."""
        task = asyncio.create_task(handle.stop())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Wait for stages that are still ending."""
        await asyncio.gather(*self._ending)


@dataclass(frozen=True)
class _PlacementInputs:
    """Inputs of a placement decision."""

    stages: tuple[PipelineStage, ...]
    """Placements of the ring."""
    lost: frozenset[int]
    """Indices of stages that are to be placed."""
    hosts: tuple[HostCapacity, ...]
    """Capacities of the hosts for them."""
    replicas: tuple[Replica, ...]
    """Replicas on the hosts."""

    def is_as_good(self, now: _PlacementInputs, decision: Replan) -> bool:
        """Whether a decision made from these inputs is as good for the current ones."""
        fresh = [new.placement for new in decision.stages if new.kept is None]
        used = [
            Replica(new.placement.host, new.placement.layers) for new in decision.stages if new.is_replica
        ]
        return (
            (now.stages, now.lost) == (self.stages, self.lost)
            and set(now.replicas).issuperset((*used, *decision.dropped))
            and is_room_as_before(self.hosts, now.hosts, (stage.host for stage in fresh))
        )


@dataclass(frozen=True)
class RecoveryContext:
    """Parts that recovery and planned moves work with."""

    pipeline: Pipeline
    """Stages and replicas."""
    members: Members
    """Hosts."""
    sizes: StageSizes
    """Sizes of the model's stages."""
    capacity_of: Callable[[Member], HostCapacity]
    """Returns the capacity of a host for stages."""
    is_there: Callable[[Member, float], Awaitable[bool]]
    """Whether a host answers within some seconds."""
    executor: PlacementExecutor
    """Loads stages."""
    cutover: RingCutover
    """Switches rings."""
    coordinator: Coordinator
    """Coordinator of the ring."""
    incidents: Incidents
    """Record of failures."""
    on_failure: OnFailure
    """Called with each lost stage, so that its error output can be read."""
    announce: Callable[[str], None]
    """Publishes the current phase."""
    clock_s: Callable[[], float]
    """Monotonic clock, seconds."""
    replan: Callable[..., Replan] = replan
    """Decides where lost stages go, as `mesh.placement.replanner.replan` does."""

    @property
    def nodes_ready(self) -> frozenset[str]:
        """Ray nodes of the hosts on which a stage can be placed."""
        return frozenset(member.ray_node_name for member in self.members.ready)

    async def decide_placement(
        self,
        lost: Callable[[], Collection[int]],
        hosts: Callable[[], Iterable[Member]],
        *,
        may_start_over: bool = True,
    ) -> Replan:
        """Placement of lost stages; other models count its memory as used from now on. See `replan`.

        Args:
            lost: Returns the indices of stages that are to be placed, at the time of the call.
            hosts: Returns the capacities of the hosts for them, likewise.
            may_start_over: Whether surviving stages may be given up.

        Raises:
            ModelDoesNotFit: With the memory that is needed and that each host has left.
            NotEnoughHosts: If there is no host for the lost stages.
        """
        pipeline = self.pipeline
        pipeline.intended = ()

        def look() -> _PlacementInputs:
            capacities = tuple(self.capacity_of(member) for member in hosts())
            return _PlacementInputs(pipeline.stages, frozenset(lost()), capacities, pipeline.replica_list())

        def make(inputs: _PlacementInputs, is_time_up: Callable[[], bool]) -> Replan:
            return self.replan(
                self.sizes,
                tuple(stage.placement for stage in inputs.stages),
                inputs.lost,
                inputs.hosts,
                inputs.replicas,
                may_start_over=may_start_over,
                is_time_up=is_time_up,
            )

        decision = await settled_plan(look, make, _PlacementInputs.is_as_good)
        pipeline.intend(decision)
        return decision

    def wires(self, decision: Replan) -> tuple[HiddenType, ...]:
        """Formats on the wire of a ring to be: as they were behind the same layers."""
        return tuple(self.pipeline.wire_behind(new.placement.layers) for new in decision.stages)


def _is_new(new: NewStage) -> bool:
    return new.kept is None and not new.is_replica


def _present(members: Mapping[str, Member], new: NewStage) -> Member:
    member = members.get(new.placement.host)
    if member is None:
        raise ClusterError(
            f"host {new.placement.host}, which was to hold layers {new.placement.layers}, left"
        )
    return member


def make_recovery_context(
    known: Preflight,
    head: Head,
    pipeline: Pipeline,
    executor: PlacementExecutor,
    coordinator: Coordinator,
    *,
    term: int,
    capacity_of: Callable[[Member], HostCapacity],
    incidents: Incidents,
    on_failure: OnFailure,
    on_plan: Callable[[Sequence[StagePlacement], str], None],
    announce: Callable[[str], None],
    topology: Topology | None = None,
) -> RecoveryContext:
    """A recovery context of a serving head; see `RecoveryContext` and `RingCutover` for the arguments."""

    async def is_there(member: Member, timeout_s: float) -> bool:
        if member.ray_node_name == head.own.ray_node_name:
            return True
        return await head.service.answers(member.name, timeout_s)

    return RecoveryContext(
        pipeline=pipeline,
        members=head.members,
        sizes=StageSizes(known.model, known.workload),
        capacity_of=capacity_of,
        is_there=is_there,
        executor=executor,
        cutover=RingCutover(pipeline, coordinator, term, on_plan),
        coordinator=coordinator,
        incidents=incidents,
        on_failure=on_failure,
        announce=announce,
        clock_s=time.monotonic,
        replan=replan if topology is None else topology.replan,
    )
