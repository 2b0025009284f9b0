"""Pipeline: the stages of one ring and their replicas; loading and wiring of several stages."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from mesh.placement.replanner import Replica
from mesh.util.terminal import progress_bars
from spanmesh_proto.errors import MeshError, StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from mesh.cluster.members import Member
    from mesh.coordinator.ring import StageAddress
    from mesh.placement.planner import StagePlacement
    from mesh.placement.replanner import Replan
    from mesh.serve.stage_handle import RingCredentials, StageHandle
    from stages.layers import LayerRange
    from stages.transport.hidden_codec import HiddenType

    OnStageError = Callable[[StageHandle, MeshError], None]

log = structlog.get_logger()


@dataclass(frozen=True)
class PipelineStage:
    """A place in the ring, and its stage."""

    placement: StagePlacement
    """Layers and host."""
    wire: HiddenType
    """Format of its hidden states on the wire to the next stage."""
    handle: StageHandle | None = None
    """The stage; None if it is lost, or not loaded yet."""

    def is_on(self, member: Member) -> bool:
        """Whether its stage runs on this host in its current membership, not in an earlier one."""
        return self.handle is not None and self.handle.member.ray_node_name == member.ray_node_name


class Pipeline:
    """Stages and replicas of one model. Changed by one task at a time: see `mesh.serve.supervisor`.

    Only replicas may be removed at any time, when layers of another model need their memory.

    Attributes:
        stages: The ring, in pipeline order.
        replicas: Replicas of stages on spare hosts.
        intended: Stages that were decided on and are not in the ring yet: their memory counts as used.
        loading: Stages that are being loaded for the ring.
        loading_replicas: Replicas that are being loaded.
        credentials: Keys of the ring; None until it is connected.
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
        """Stages of the ring that are loaded."""
        return tuple(stage.handle for stage in self.stages if stage.handle is not None)

    @property
    def placements(self) -> tuple[StagePlacement, ...]:
        """Placements of the ring's stages."""
        return tuple(stage.placement for stage in self.stages)

    def intend(self, decision: Replan) -> None:
        """Record the stages of a decision, before any other decision is made."""
        self.intended = tuple(new.placement for new in decision.stages if new.kept is None)

    def held_on(self, host: str) -> tuple[StagePlacement, ...]:
        """Stages that a host holds or is to hold; without replicas."""
        seated = (stage.placement for stage in self.stages if stage.handle is not None)
        return tuple(placement for placement in (*seated, *self.intended) if placement.host == host)

    def replicas_on(self, host: str) -> tuple[StageHandle, ...]:
        """Replicas that a host has loaded or is loading."""
        return tuple(
            replica for replica in (*self.replicas, *self.loading_replicas) if replica.member.name == host
        )

    def replica_list(self) -> tuple[Replica, ...]:
        """Replicas as the planner takes them."""
        return tuple(Replica(replica.member.name, replica.config.layers) for replica in self.replicas)

    def source_of(self, replica: StageHandle) -> StageHandle | None:
        """The ring's stage with the layers of a replica; None if there is none."""
        return next((stage for stage in self.handles if stage.config.layers == replica.config.layers), None)

    def promote_replica(self, replica: Replica) -> StageHandle:
        """Turn a replica into a stage of the ring.

        Raises:
            StageFailed: If it is gone: its host may just have been evicted.
        """
        for handle in self.replicas:
            if handle.member.name == replica.host and handle.config.layers == replica.layers:
                self.replicas.remove(handle)
                return handle
        raise StageFailed(f"the replica of layers {replica.layers} on {replica.host} is lost")

    def release(self, replica: StageHandle) -> None:
        """Remove a replica from the pipeline without ending it."""
        for among in (self.replicas, self.loading_replicas):
            if replica in among:
                among.remove(replica)

    def drop_replica(self, replica: StageHandle) -> None:
        """End a replica, or its loading. Later calls have no effect."""
        replica.kill()
        self.release(replica)

    def mark_lost(self, index: int) -> None:
        """Record the loss of a stage, and kill its process, which may only be frozen."""
        stage = self.stages[index]
        if stage.handle is not None:
            stage.handle.kill()
        self.stages = (*self.stages[:index], replace(stage, handle=None), *self.stages[index + 1 :])

    @property
    def lost(self) -> frozenset[int]:
        """Indices of stages that the ring lacks."""
        return frozenset(index for index, stage in enumerate(self.stages) if stage.handle is None)

    def wire_behind(self, layers: LayerRange) -> HiddenType:
        """Format on the wire behind the stage that held the last of these layers."""
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


def log_stage_error(handle: StageHandle, error: MeshError) -> None:
    """Log which stage failed; for callers that need nothing else."""
    layers = str(handle.config.layers)
    log.warning("stage_in_trouble", host=handle.member.name, layers=layers, reason=error.message)


async def attributing(
    work: Callable[[], Coroutine[Any, Any, None]], handle: StageHandle, on_stage_error: OnStageError
) -> None:
    """Do work for a stage; if it fails, report the stage.

    Args:
        work: Returns the awaitable. A coroutine made before would never be awaited if this is cancelled
            before it begins, and Python would print a warning.
        handle: The stage.
        on_stage_error: Called with it and the error.
    """
    try:
        await work()
    except MeshError as error:
        on_stage_error(handle, error)
        raise


async def run_concurrently(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first failure ends the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def load_all(handles: Sequence[StageHandle], on_stage_error: OnStageError) -> None:
    """Start and load stages, all at once, with progress.

    Args:
        handles: The stages.
        on_stage_error: Called with each stage that failed, and the error.

    Raises:
        ModelDoesNotFit: If a host has too little memory left; nothing is loaded then.
        MeshError: Error of the first stage that failed.
    """
    await run_concurrently(attributing(handle.place, handle, on_stage_error) for handle in handles)
    await run_concurrently(attributing(handle.check_memory, handle, on_stage_error) for handle in handles)
    with progress_bars() as bars:
        await run_concurrently(
            attributing(partial(handle.load, bars.add(f"{handle.who}: waiting")), handle, on_stage_error)
            for handle in handles
        )


async def wire_up(
    stages: Sequence[PipelineStage], credentials: RingCredentials, on_stage_error: OnStageError
) -> tuple[StageAddress, ...]:
    """Connect loaded stages to a ring, each linked to the next.

    Args:
        stages: In pipeline order.
        credentials: Keys of the new ring.
        on_stage_error: Called with each stage that did not answer, or that the stage before it could not
            reach, and the error.

    Returns:
        Addresses of the stages, in pipeline order.

    Raises:
        MeshError: If a stage does not answer, or cannot reach the next.
    """
    handles = [stage.handle for stage in stages if stage.handle is not None]
    if len(handles) < len(stages):
        raise StageFailed("a stage of the ring was lost before it was wired")
    await run_concurrently(
        attributing(partial(_enter, handle, index, credentials, stage.wire), handle, on_stage_error)
        for index, (handle, stage) in enumerate(zip(handles, stages, strict=True))
    )
    await run_concurrently(
        attributing(partial(handle.connect, following), following, on_stage_error)
        for handle, following in itertools.pairwise(handles)
    )
    return tuple(handle.address for handle in handles)


async def _enter(handle: StageHandle, index: int, credentials: RingCredentials, wire: HiddenType) -> None:
    await handle.serve()
    await handle.rejoin(index, credentials, wire)
