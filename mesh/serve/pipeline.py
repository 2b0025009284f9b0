"""Pipeline: the stages of one ring and their replicas."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mesh.placement.replanner import Copy
from spanmesh_proto.errors import StageFailed

if TYPE_CHECKING:
    from mesh.cluster.members import Member
    from mesh.placement.planner import StagePlacement
    from mesh.placement.replanner import Replan
    from mesh.serve.stage_handle import MeshKeys, StageHandle
    from stages.layers import LayerRange
    from stages.transport.hidden_codec import HiddenType


@dataclass(frozen=True)
class Seat:
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


class Fleet:
    """Of one model. Changed by one task at a time: see `mesh.serve.supervisor`.

    Only copies may go at any time, when layers of another model need their room.

    Attributes:
        seats: The ring, in pipeline order.
        copies: Stages loaded ahead.
        intended: What was decided on and is not in the ring yet: nobody else may count on its room.
        loading: Stages that are being loaded for the ring.
        coming: Copies that are being loaded.
        keys: Of the ring; None until it is wired.
    """

    def __init__(self) -> None:
        self.keys: MeshKeys | None = None
        self.seats: tuple[Seat, ...] = ()
        self.copies: list[StageHandle] = []
        self.intended: tuple[StagePlacement, ...] = ()
        self.loading: tuple[StageHandle, ...] = ()
        self.coming: list[StageHandle] = []

    @property
    def handles(self) -> tuple[StageHandle, ...]:
        """The ring's stages, as far as they are there."""
        return tuple(seat.handle for seat in self.seats if seat.handle is not None)

    @property
    def placements(self) -> tuple[StagePlacement, ...]:
        """The ring's layers."""
        return tuple(seat.placement for seat in self.seats)

    def intend(self, decision: Replan) -> None:
        """Note what is to be loaded, or to become a stage, before anybody else decides."""
        self.intended = tuple(new.placement for new in decision.stages if new.kept is None)

    def held_on(self, host: str) -> tuple[StagePlacement, ...]:
        """Stages that a host holds, or soon will; copies are left out."""
        seated = (seat.placement for seat in self.seats if seat.handle is not None)
        return tuple(placement for placement in (*seated, *self.intended) if placement.host == host)

    def copies_on(self, host: str) -> tuple[StageHandle, ...]:
        """Copies that a host has loaded, or is loading."""
        return tuple(copy for copy in (*self.copies, *self.coming) if copy.member.name == host)

    def copy_list(self) -> tuple[Copy, ...]:
        """What the planner must know of the copies."""
        return tuple(Copy(copy.member.name, copy.config.layers) for copy in self.copies)

    def origin_of(self, copy: StageHandle) -> StageHandle | None:
        """The stage of the ring with the layers of a copy; None if there is none."""
        return next((stage for stage in self.handles if stage.config.layers == copy.config.layers), None)

    def take_copy(self, copy: Copy) -> StageHandle:
        """The stage that a copy stands for; it is no copy any more.

        Raises:
            StageFailed: If there is none any more: its host may have been evicted a moment ago.
        """
        for handle in self.copies:
            if handle.member.name == copy.host and handle.config.layers == copy.layers:
                self.copies.remove(handle)
                return handle
        raise StageFailed(f"the copy of layers {copy.layers} on {copy.host} is gone")

    def release(self, copy: StageHandle) -> None:
        """It is no copy any more; whoever says so ends it."""
        for among in (self.copies, self.coming):
            if copy in among:
                among.remove(copy)

    def drop_copy(self, copy: StageHandle) -> None:
        """End a copy, or the loading of one; one that was dropped before stays so."""
        copy.kill()
        self.release(copy)

    def lose(self, index: int) -> None:
        """Note that a stage of the ring is gone, and see to it that it is: it may only be frozen."""
        seat = self.seats[index]
        if seat.handle is not None:
            seat.handle.kill()
        self.seats = (*self.seats[:index], replace(seat, handle=None), *self.seats[index + 1 :])

    @property
    def lost(self) -> frozenset[int]:
        """Indices of stages that the ring lacks."""
        return frozenset(index for index, seat in enumerate(self.seats) if seat.handle is None)

    def wire_behind(self, layers: LayerRange) -> HiddenType:
        """How hidden states travelled from the stage that held the last of these layers."""
        return next(
            seat.wire
            for seat in self.seats
            if seat.placement.layers.start < layers.stop <= seat.placement.layers.stop
        )

    async def stop(self) -> None:
        """End every stage."""
        handles = (*self.handles, *self.copies)
        self.seats, self.copies, self.intended = (), [], ()
        await asyncio.gather(*(handle.stop() for handle in handles))
