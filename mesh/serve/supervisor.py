"""Supervisor of a pipeline: recovery of a broken ring, planned moves and replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NoReturn

import structlog

from mesh.coordinator.ring import RingLoss
from mesh.serve.pipeline import log_stage_error
from mesh.serve.recovery import RingRepair
from spanmesh_proto.errors import InvalidModel, MeshError, ModelDoesNotFit, NotEnoughHosts

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Iterable

    from mesh.cluster.members import Member
    from mesh.placement.replanner import Replan
    from mesh.serve.host_draining import HostDraining
    from mesh.serve.pipeline import PipelineStage
    from mesh.serve.reconfiguration import RecoveryContext
    from mesh.serve.replicas import ReplicaManager
    from mesh.serve.stage_handle import StageHandle

# Hosts are checked when one changes, and at least at this interval.
_POLL_S: Final = 1.0
# After so many moves in a row whose stages could not be loaded, the hosts that are to leave are told.
_STUCK_AFTER: Final = 2

log = structlog.get_logger()


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
        # Failed moves in a row, by host that is to leave, and the hosts on which stages could not be loaded.
        self._failed_moves: Counter[str] = Counter()
        self._failed_hosts: set[str] = set()

    async def run(self) -> NoReturn:
        """Run until cancelled; failed work is tried again."""
        while True:
            loss = await self._until_broken(self._wait_for_work())
            if loss is None and not self._context.pipeline.lost:
                loss = await self._move()
            if loss is not None or self._context.pipeline.lost:
                repair = RingRepair(self._context, self._on_waiting)
                await repair.run(loss or RingLoss("a host was evicted", ()))

    async def _wait_for_work(self) -> None:
        """Return when a stage is to be moved or is lost; replicas are loaded meanwhile."""
        spares = asyncio.create_task(self._replica_manager.run())
        try:
            while not (self._context.pipeline.lost or self._to_move()):
                self._forget_failed_moves()
                for member in self._host_draining.leaving:
                    self._host_draining.release_if_free(member)
                if spares.done():
                    spares.result()
                await self._context.members.change_within(_POLL_S)
        finally:
            spares.cancel()
            await asyncio.gather(spares, return_exceptions=True)

    def _to_move(self) -> frozenset[int]:
        """Indices of stages whose host keeps no layers, or has left while they still run."""
        staying = [member for member in self._context.members if member.keeps_layers]
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
        leaving = frozenset(context.pipeline.stages[index].placement.host for index in to_move)
        decided: list[Replan] = []

        async def decide() -> None:
            decided.append(await self._decide_move())

        try:
            loss = await self._until_broken(decide())
        except (ModelDoesNotFit, NotEnoughHosts) as error:
            return await self._until_broken(self._report_stuck(leaving, error))
        if loss is not None:
            context.pipeline.intended = ()
            return loss
        return await self._carry_out(decided[0], leaving)

    async def _carry_out(self, decision: Replan, leaving: Collection[str]) -> RingLoss | None:
        """Load the stages of a move and cut over.

        Args:
            decision: The new placement.
            leaving: Names of the hosts that are to leave.

        Returns:
            Loss of the ring, if it broke meanwhile.
        """
        context = self._context
        log.info("moving", how=decision.reason)
        context.announce(f"moving {decision.reason}")
        stages: list[PipelineStage] = []

        async def fill() -> None:
            stages.extend(
                await context.executor.load_stages(decision, context.wires(decision), self._on_stage_error)
            )

        try:
            loss = await self._until_broken(fill())
            if loss is not None:
                self._keep_as_replicas(stages)
                return loss
            await context.cutover.cut_over(tuple(stages), decision.reason, log_stage_error)
        except MeshError as error:
            log.warning("move_failed", reason=error.message)
            if stages:
                return RingLoss(error.message, ())
            return await self._until_broken(self._on_failed_move(leaving, error))
        self._forget_failed_moves()
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

    async def _decide_move(self) -> Replan:
        """Placement of the stages to move. Hosts on which such a stage could not be loaded are a last resort.

        Raises:
            ModelDoesNotFit: With the memory that is needed and that each host has left.
            NotEnoughHosts: If there is no host for the stages.
        """
        context, failed = self._context, self._failed_hosts

        def others() -> list[Member]:
            return [member for member in context.members.ready if member.name not in failed]

        if failed:
            with contextlib.suppress(ModelDoesNotFit, NotEnoughHosts):
                return await context.decide_placement(self._to_move, others, may_start_over=False)
        return await context.decide_placement(
            self._to_move, lambda: context.members.ready, may_start_over=False
        )

    def _on_stage_error(self, handle: StageHandle, error: MeshError) -> None:
        self._failed_hosts.add(handle.member.name)
        log_stage_error(handle, error)

    def _forget_failed_moves(self) -> None:
        self._failed_moves.clear()
        self._failed_hosts.clear()

    async def _on_failed_move(self, leaving: Collection[str], error: MeshError) -> None:
        """Wait after a move whose stages could not be loaded; the old ring serves."""
        self._failed_moves.update(leaving)
        # A model whose file was replaced cannot be sent to any host; another failure may pass.
        is_final = isinstance(error, InvalidModel)
        stuck = [name for name in leaving if is_final or self._failed_moves[name] >= _STUCK_AFTER]
        await self._report_stuck(stuck, error)

    def _on_waiting(self, error: MeshError) -> None:
        """Release hosts that are to leave, or tell them why not, while a broken ring cannot be repaired."""
        stages = self._context.pipeline.stages
        for member in self._host_draining.leaving:
            is_free = self._host_draining.release_if_free(member)
            if not is_free and any(stage.is_on(member) for stage in stages):
                self._host_draining.report_stuck(member.name, error.message)

    async def _report_stuck(self, names: Iterable[str], error: MeshError) -> None:
        """Tell hosts that their layers cannot be moved now, and wait."""
        self._context.announce("serving")
        for name in names:
            self._host_draining.report_stuck(name, error.message)
        await self._context.members.change_within(_POLL_S)

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
