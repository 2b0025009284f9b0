"""Replica manager: replicas of stages on spare hosts, loaded and checked.

A copy follows its stage: it is told what that computes, so that a repair has little to compute again either.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NoReturn

import structlog

from mesh.placement.planner import StagePlacement
from mesh.placement.replanner import left_beside_replicas, next_replica
from mesh.placement.stage_sizes import memory_on
from mesh.serve.planning import plan_in_thread
from mesh.serve.stage_group import load_all
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.cluster.members import Member, Members
    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.replanner import Replica
    from mesh.placement.stage_sizes import StageSizes
    from mesh.serve.pipeline import Pipeline
    from mesh.serve.stage_factory import StageMaker
    from mesh.serve.stage_handle import StageHandle

log = structlog.get_logger()

# Copies are asked this often whether they live. It also tells them that the head does: who hears from
# nobody ends by itself after a while.
_CHECK_S: Final = 5.0
_PATIENCE_S: Final = 5.0
# A host where a copy could not be loaded is tried again after this long.
_RETRY_S: Final = 60.0
# Right after a repair sessions replay: no process is to start then that takes their processors.
_CALM_S: Final = 4.0


class ReplicaManager:
    """Works while all is well, and is cancelled when it is not.

    Args:
        pipeline: Gets the copies.
        maker: Makes stages.
        members: Hosts.
        sizes: Of the model's stages.
        capacity_of: What a host gives to copies, as the planner sees it.
        threads_of: How many of a host's threads a copy is to compute with.
        clock_s: Monotonic, seconds.
        are_wanted: Whether copies are of use: not if layers are locked to their hosts.
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
        """Load one copy after the other, and look after those that there are."""
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
        # Whether it still finds room is looked at again when it is loaded.
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
                return  # meanwhile another model took the room
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
        """Have every copy follow the stage whose layers it has; one that does already goes on."""
        credentials = self._pipeline.credentials
        for replica in tuple(self._pipeline.replicas):
            stage = self._pipeline.source_of(replica)
            if stage is None or credentials is None:
                continue
            try:
                await replica.follow(stage, credentials)
            except MeshError as error:
                # It is looked at again soon, and computes what it lacks if it is needed before.
                log.warning("replica_does_not_follow", host=replica.member.name, reason=error.message)

    async def _check(self) -> None:
        """Drop copies that are gone, or whose host has left."""
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
