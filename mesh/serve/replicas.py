"""Replica manager: loads replicas of stages on spare hosts and checks them.

A replica follows its stage: it receives the stage's KV rows, so that a recovery has little to recompute.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NoReturn

import structlog

from mesh.placement.gpu_layers import memory_on
from mesh.placement.planner import StagePlacement
from mesh.placement.replanner import left_beside_replicas, next_replica
from mesh.serve.pipeline import load_all
from mesh.serve.planning import plan_in_thread
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.cluster.members import Member, Members
    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.memory_estimate import StageSizes
    from mesh.placement.replanner import Replica
    from mesh.serve.pipeline import Pipeline
    from mesh.serve.stage_factory import StageMaker
    from mesh.serve.stage_handle import StageHandle

# Interval of the pings to replicas, which also show them that the head is alive: a replica without any
# contact ends itself after some time.
_CHECK_S: Final = 5.0
_PATIENCE_S: Final = 5.0
# A host where a replica could not be loaded is tried again after this time.
_RETRY_S: Final = 60.0
# Right after a recovery sessions replay: no process should start then and take their processors.
_CALM_S: Final = 4.0

log = structlog.get_logger()


class ReplicaManager:
    """Loads and checks replicas while the ring is whole; cancelled when it breaks.

    Args:
        pipeline: Receives the replicas.
        maker: Makes stages.
        members: Hosts.
        sizes: Sizes of the model's stages.
        capacity_of: Returns the capacity of a host for replicas.
        threads_of: Returns the number of threads of a host for a replica.
        clock_s: Monotonic clock, seconds.
        are_wanted: Whether replicas are useful: not if layers are locked to their hosts.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        maker: StageMaker,
        members: Members,
        sizes: StageSizes,
        *,
        capacity_of: Callable[[Member], HostCapacity],
        clock_s: Callable[[], float],
        threads_of: Callable[[Member], int] = lambda member: member.facts.num_threads,
        are_wanted: bool = True,
    ) -> None:
        self._pipeline = pipeline
        self._maker = maker
        self._members = members
        self._sizes = sizes
        self._capacity_of = capacity_of
        self._threads_of = threads_of
        self._clock_s = clock_s
        self._are_wanted = are_wanted
        self._not_before_s: dict[str, float] = {}

    async def run(self) -> NoReturn:
        """Load one replica after the other, and check the existing ones."""
        await self._follow()
        await asyncio.sleep(_CALM_S)
        while True:
            await self._check()
            await self._follow()
            replica = await self._next()
            if replica is not None:
                await self._load(replica)
            else:
                await self._members.change_within(_CHECK_S)

    async def _next(self) -> Replica | None:
        if not self._are_wanted:
            return None
        now_s = self._clock_s()
        hosts = [
            self._capacity_of(member)
            for member in self._members.ready
            if self._not_before_s.get(member.ray_node_name, 0.0) <= now_s
        ]
        stages, replicas = self._pipeline.placements, self._pipeline.replica_list()
        # Whether it still fits is checked again when it is loaded.
        return await plan_in_thread(lambda _: next_replica(self._sizes, stages, hosts, replicas))

    async def _load(self, replica: Replica) -> None:
        member = self._members.find(replica.host)
        if member is None:
            return
        handle: StageHandle | None = None
        try:
            await self._maker.describe([(replica.host, replica.layers)])
            held = [other for other in self._pipeline.replica_list() if other.host == replica.host]
            left = left_beside_replicas(self._sizes, self._capacity_of(member), held)
            memory = memory_on(self._sizes, replica.layers, left)
            if memory is None:
                return  # another model took the memory meanwhile
            placement = StagePlacement(replica.host, replica.layers, memory)
            handle = self._maker.make(
                placement,
                member,
                wire=self._pipeline.wire_behind(replica.layers),
                num_threads=self._threads_of(member),
            )
            self._pipeline.loading_replicas.append(handle)
            await load_all([handle], lambda _handle, _error: None)
            await handle.serve()
            self._pipeline.replicas.append(handle)
        except MeshError as error:
            log.warning("replica_failed", host=replica.host, layers=str(replica.layers), reason=error.message)
            self._not_before_s[member.ray_node_name] = self._clock_s() + _RETRY_S
        finally:
            if handle is not None and handle in self._pipeline.loading_replicas:
                self._pipeline.loading_replicas.remove(handle)
            if handle is not None and handle not in self._pipeline.replicas:
                handle.kill()
        log.info("copies", hosts=[f"{each.host} {each.layers}" for each in self._pipeline.replica_list()])

    async def _follow(self) -> None:
        """Let every replica follow the stage with its layers; those that follow already continue."""
        credentials = self._pipeline.credentials
        for replica in tuple(self._pipeline.replicas):
            stage = self._pipeline.source_of(replica)
            if stage is None or credentials is None:
                continue
            try:
                await replica.follow(stage, credentials)
            except MeshError as error:
                # It is tried again soon; a replica that is needed before recomputes what it lacks.
                log.warning("replica_does_not_follow", host=replica.member.name, reason=error.message)

    async def _check(self) -> None:
        """Drop replicas that are gone, or whose host has left."""
        replicas = tuple(self._pipeline.replicas)
        losses = await asyncio.gather(*(replica.loss(_PATIENCE_S) for replica in replicas))
        nodes = {member.ray_node_name for member in self._members}
        for replica, loss in zip(replicas, losses, strict=True):
            if loss is not None or replica.member.ray_node_name not in nodes:
                reason = "its host left" if loss is None else loss.reason
                log.warning(
                    "replica_lost", host=replica.member.name, layers=str(replica.config.layers), reason=reason
                )
                self._pipeline.drop_replica(replica)
