"""Supervisor of a pipeline: recovery, planned moves and replicas."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NoReturn

import structlog

from mesh.coordinator.ring import RingLoss
from mesh.serve.recovery import RingRepair
from mesh.serve.stage_group import log_stage_error
from spanmesh_proto.errors import InvalidModel, MeshError, ModelDoesNotFit, NotEnoughHosts

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from mesh.placement.replanner import Replan
    from mesh.serve.host_draining import HostDraining
    from mesh.serve.pipeline import PipelineStage
    from mesh.serve.reconfiguration import RecoveryContext
    from mesh.serve.replicas import ReplicaManager

log = structlog.get_logger()

# Hosts are checked when one changes, and at least at this interval.
_POLL_S: Final = 1.0


class Supervisor:
    """The only task that changes a pipeline.

    Args:
        context: Parts that recovery and moves work with.
        replica_manager: Loads replicas while there is nothing else to do.
        host_draining: Hosts that are to leave.
    """

    def __init__(
        self, context: RecoveryContext, replica_manager: ReplicaManager, host_draining: HostDraining
    ) -> None:
        self._context = context
        self._replica_manager = replica_manager
        self._host_draining = host_draining

    async def run(self) -> NoReturn:
        """Run until cancelled; failed work is tried again."""
        while True:
            loss = await self._until_broken(self._wait_for_work())
            if loss is None and not self._context.pipeline.lost:
                loss = await self._move()
            if loss is not None or self._context.pipeline.lost:
                await RingRepair(self._context).run(loss or RingLoss("a host was evicted", ()))

    async def _wait_for_work(self) -> None:
        """Return when a stage is to be moved or is lost; replicas are loaded meanwhile."""
        spares = asyncio.create_task(self._replica_manager.run())
        try:
            while not (self._context.pipeline.lost or self._to_move()):
                for member in self._host_draining.leaving:
                    self._host_draining.release_if_free(member)
                if spares.done():
                    spares.result()
                await self._context.members.change_within(_POLL_S)
        finally:
            spares.cancel()
            await asyncio.gather(spares, return_exceptions=True)

    def _to_move(self) -> frozenset[int]:
        """Indices of stages whose host is leaving, or has left while they still run."""
        staying = [member for member in self._context.members if not member.is_leaving]
        return frozenset(
            index
            for index, stage in enumerate(self._context.pipeline.stages)
            if not any(stage.is_on(member) for member in staying)
        )

    async def _move(self) -> RingLoss | None:
        """Make before break: load stages elsewhere while the ring serves, then cut over.

        Returns:
            Loss of the ring, if it broke meanwhile.
        """
        context, to_move = self._context, self._to_move()
        if not to_move:
            return None
        decided: list[Replan] = []

        async def decide() -> None:
            decided.append(
                await context.decide_placement(
                    self._to_move, lambda: context.members.ready, may_start_over=False
                )
            )

        try:
            loss = await self._until_broken(decide())
        except (ModelDoesNotFit, NotEnoughHosts) as error:
            return await self._until_broken(self._on_no_candidate(to_move, error))
        if loss is not None:
            context.pipeline.intended = ()
            return loss
        decision = decided[0]
        log.info("moving", how=decision.reason)
        context.announce(f"moving {decision.reason}")
        stages: list[PipelineStage] = []

        async def fill() -> None:
            stages.extend(
                await context.executor.load_stages(decision, context.wires(decision), log_stage_error)
            )

        try:
            loss = await self._until_broken(fill())
            if loss is not None:
                self._keep_as_replicas(stages)
                return loss
            await context.cutover.cut_over(tuple(stages), decision.reason, log_stage_error)
        except MeshError as error:
            log.warning("move_failed", reason=error.message)
            return RingLoss(error.message, ()) if stages else await self._on_not_loaded(to_move, error)
        context.incidents.moved()
        context.announce("serving")
        return None

    def _keep_as_replicas(self, stages: Iterable[PipelineStage]) -> None:
        """Keep stages that were loaded for a ring that was never connected: they help the recovery."""
        pipeline = self._context.pipeline
        pipeline.intended = ()
        for stage in stages:
            if stage.handle is not None and stage.handle not in pipeline.handles:
                pipeline.replicas.append(stage.handle)

    async def _on_no_candidate(self, to_move: frozenset[int], error: MeshError) -> None:
        pipeline = self._context.pipeline
        for name in {pipeline.stages[index].placement.host for index in to_move}:
            self._host_draining.report_stuck(name, error.message)
        await self._context.members.change_within(_POLL_S)

    async def _on_not_loaded(self, to_move: frozenset[int], error: MeshError) -> RingLoss | None:
        """Let the hosts stay that hold what cannot be loaded elsewhere; another failure may pass."""
        if not isinstance(error, InvalidModel):
            return None
        return await self._until_broken(self._on_no_candidate(to_move, error))

    async def _until_broken(self, work: Coroutine[Any, Any, None]) -> RingLoss | None:
        """Run work until it is done, or until the ring breaks; returns the loss.

        Raises:
            MeshError: Any error of the work.
        """
        working = asyncio.create_task(work)
        watching = asyncio.create_task(self._context.coordinator.broken())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                return watching.result()
            working.result()
            return None
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)
