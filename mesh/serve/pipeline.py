"""Pipeline: the stages of one ring and their replicas."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mesh.placement.replanner import Replica
from spanmesh_proto.errors import StageFailed

if TYPE_CHECKING:
    from mesh.cluster.members import Member
    from mesh.placement.planner import StagePlacement
    from mesh.placement.replanner import Replan
    from mesh.serve.stage_handle import RingCredentials, StageHandle
    from stages.layers import LayerRange
    from stages.transport.hidden_codec import HiddenType


@dataclass(frozen=True)
class PipelineStage:
    """A place in the ring, and who sits there.

    Attributes:
        placement: Which layers, on which host.
        wire: How hidden states travel from here to the next.
        handle: The stage; None if it is lost, or not there yet.
    """

    placement: StagePlacement
    wire: HiddenType
    handle: StageHandle | None = None

    def is_on(self, member: Member) -> bool:
        """Whether its stage runs on this host as it is in the mesh now, not as before it came again."""
        return self.handle is not None and self.handle.member.ray_node_name == member.ray_node_name


class Pipeline:
    """Of one model. Changed by one task at a time: see `mesh.serve.supervisor`.

    Only copies may go at any time, when layers of another model need their room.

    Attributes:
        stages: The ring, in pipeline order.
        replicas: Stages loaded ahead.
        intended: What was decided on and is not in the ring yet: nobody else may count on its room.
        loading: Stages that are being loaded for the ring.
        loading_replicas: Copies that are being loaded.
        credentials: Of the ring; None until it is wired.
    """

    def __init__(self) -> None:
        self.credentials: RingCredentials | None = None
        self.stages: tuple[PipelineStage, ...] = ()
        self.replicas: list[StageHandle] = []
        self.intended: tuple[StagePlacement, ...] = ()
        self.loading: tuple[StageHandle, ...] = ()
        self.loading_replicas: list[StageHandle] = []

    @property
    def handles(self) -> tuple[StageHandle, ...]:
        """The ring's stages, as far as they are there."""
        return tuple(stage.handle for stage in self.stages if stage.handle is not None)

    @property
    def placements(self) -> tuple[StagePlacement, ...]:
        """The ring's layers."""
        return tuple(stage.placement for stage in self.stages)

    def intend(self, decision: Replan) -> None:
        """Note what is to be loaded, or to become a stage, before anybody else decides."""
        self.intended = tuple(new.placement for new in decision.stages if new.kept is None)

    def held_on(self, host: str) -> tuple[StagePlacement, ...]:
        """Stages that a host holds, or soon will; copies are left out."""
        seated = (stage.placement for stage in self.stages if stage.handle is not None)
        return tuple(placement for placement in (*seated, *self.intended) if placement.host == host)

    def replicas_on(self, host: str) -> tuple[StageHandle, ...]:
        """Copies that a host has loaded, or is loading."""
        return tuple(
            replica for replica in (*self.replicas, *self.loading_replicas) if replica.member.name == host
        )

    def replica_list(self) -> tuple[Replica, ...]:
        """What the planner must know of the copies."""
        return tuple(Replica(replica.member.name, replica.config.layers) for replica in self.replicas)

    def source_of(self, replica: StageHandle) -> StageHandle | None:
        """The stage of the ring with the layers of a copy; None if there is none."""
        return next((stage for stage in self.handles if stage.config.layers == replica.config.layers), None)

    def promote_replica(self, replica: Replica) -> StageHandle:
        """The stage that a copy stands for; it is no copy any more.

        Raises:
            StageFailed: If there is none any more: its host may have been evicted a moment ago.
        """
        for handle in self.replicas:
            if handle.member.name == replica.host and handle.config.layers == replica.layers:
                self.replicas.remove(handle)
                return handle
        raise StageFailed(f"the copy of layers {replica.layers} on {replica.host} is gone")

    def release(self, replica: StageHandle) -> None:
        """It is no copy any more; whoever says so ends it."""
        for among in (self.replicas, self.loading_replicas):
            if replica in among:
                among.remove(replica)

    def drop_replica(self, replica: StageHandle) -> None:
        """End a copy, or the loading of one; one that was dropped before stays so."""
        replica.kill()
        self.release(replica)

    def mark_lost(self, index: int) -> None:
        """Note that a stage of the ring is gone, and see to it that it is: it may only be frozen."""
        stage = self.stages[index]
        if stage.handle is not None:
            stage.handle.kill()
        self.stages = (*self.stages[:index], replace(stage, handle=None), *self.stages[index + 1 :])

    @property
    def lost(self) -> frozenset[int]:
        """Indices of stages that the ring lacks."""
        return frozenset(index for index, stage in enumerate(self.stages) if stage.handle is None)

    def wire_behind(self, layers: LayerRange) -> HiddenType:
        """How hidden states travelled from the stage that held the last of these layers."""
        return next(
            stage.wire
            for stage in self.stages
            if stage.placement.layers.start < layers.stop <= stage.placement.layers.stop
        )

    async def stop(self) -> None:
        """End every stage."""
        handles = (*self.handles, *self.replicas)
        self.stages, self.replicas, self.intended = (), [], ()
        await asyncio.gather(*(handle.stop() for handle in handles))
