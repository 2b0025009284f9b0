"""Deployment of a model on one host: its process there, and another one when either is lost or leaves."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import structlog

from mesh.placement.planner import Plan, StagePlacement
from mesh.placement.replanner import NewStage, Replan
from mesh.serve.deployment import announce_layers
from mesh.serve.failures import CrashLogs
from mesh.serve.head_failover import adopted, end_ring, returned_host, ring_fault
from mesh.serve.pipeline import PipelineStage, log_stage_error, wire_up
from mesh.serve.reconfiguration import PlacementExecutor
from mesh.serve.stage_handle import StageLoss, new_ring_credentials
from mesh.util.tasks import first_of, run_to_end
from spanmesh_proto.errors import (
    ClusterError,
    HostUnreachable,
    InvalidModel,
    MeshError,
    ModelDoesNotFit,
    NotEnoughHosts,
    StageFailed,
)
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from mesh.cluster.members import Member
    from mesh.placement.host_capacity import HostCapacity
    from mesh.serve.allocations import HostAllocations
    from mesh.serve.failures import Incidents
    from mesh.serve.head import Head
    from mesh.serve.head_state import SavedRing, SavedStage
    from mesh.serve.host_draining import HostDraining
    from mesh.serve.pipeline import Pipeline
    from mesh.serve.reconfiguration import Maker
    from mesh.serve.stage_handle import StageHandle
    from stages.layers import LayerRange
    from stages.runtime.process_memory import StageMemory
    from stages.transport.channels import Identity

# The process is pinged at this interval; a batch that fails is noticed at once.
_POLL_S: Final = 2.0
_PATIENCE_S: Final = 5.0
# Hosts look for a new head every second or so.
_WAIT_FOR_HOST_S: Final = 8.0
# After a failed attempt, longer after each.
_FIRST_PAUSE_S: Final = 0.3
_MOST_PAUSE_S: Final = 3.0
# A host that failed this often during one repair is left out until no other is left.
_MOST_STRIKES: Final = 2
_RETRY_S: Final = 3.0
_RETRY_AFTER_S: Final = 10
_HOST_LEFT: Final = StageLoss("its host left")

log = structlog.get_logger()


class HostedLink(Protocol):
    """A channel to the process."""

    async def retire(self) -> None:
        """Close it when what is under way is computed."""

    async def close(self) -> None:
        """Close it; what is under way fails."""


class HostedEngine(Protocol):
    """Answers requests with the process, while there is one."""

    def suspend(self) -> None:
        """Go on without the process, or wait for another one."""

    def give_up(self, error: MeshError) -> None:
        """Go on without the process, or refuse requests."""

    async def broken(self) -> MeshError:
        """Return the reason when the process is of no use: `HostUnreachable` without a connection to it."""

    async def run(self) -> NoReturn:
        """Work until cancelled."""


class HostedState(Protocol):
    """State of a model on one host, for `/mesh/status`."""

    phase: str
    """Current step, in a few words."""
    plan_reason: str | None
    """Reason of the placement, once it is known."""
    incidents: Incidents
    """Recent failures."""


class Hosted(Protocol):
    """A model that one host holds: an embedding model, or an encoder of pictures."""

    name: str
    """Its name."""
    owner: str
    """Name of the model with which it is unloaded."""
    what: str
    """What it is, for messages, such as `an embedding model`."""
    setup: str
    """Fingerprint of all settings that it is loaded with."""
    engine: HostedEngine
    """Answers requests."""
    state: HostedState
    """For `/mesh/status`."""
    pipeline: Pipeline
    """All of it as one stage."""
    layers: LayerRange
    """All of its layers."""
    memory: StageMemory
    """Its memory on a host's processor."""
    request_bytes: int
    """Memory on the head's host besides."""
    most_threads: int | None
    """Threads of a host for it; None for those that no other model computes with."""
    computes_at_times: bool
    """Whether it leaves the speed of its host to models, since it seldom computes."""
    can_do_without: bool
    """Whether requests are answered without a host: then its deployment ends rather than wait for one."""

    def memory_on(self, host: HostCapacity) -> StageMemory | None:
        """Its memory on a host; None if it does not fit."""

    def place(self, hosts: Sequence[HostCapacity]) -> Plan:
        """The best host for it.

        Raises:
            NotEnoughHosts: If there is no host.
            ModelDoesNotFit: With the memory that is needed and that each host has left.
        """

    async def answer_at(
        self, address: str, host: str, mesh_key: str, identity: Identity | None
    ) -> HostedLink:
        """Answer requests with the process at an address from now on; returns the link to it.

        Raises:
            MeshError: If it does not answer.
        """


class OneHostDeployment:
    """Deployment of a model on one host: loads it there, then supervises it.

    Args:
        model: Its state is kept up to date; its engine answers once the model is loaded.
        maker: Makes its process.
        head: The open head.
        allocations: Allocations of all models; this model has one while it runs.
        host_draining: Hosts that are to leave.
        former: Its process of a former head, if there is one to take over.
        term: Term of this head.
        before_planning: Awaited unless the process is taken over: models with precedence are placed first.
        strikes: How often each host has failed so far.

    Attributes:
        on_decided: Called when the memory of a host that was chosen counts as used.
    """

    def __init__(
        self,
        model: Hosted,
        maker: Maker,
        head: Head,
        allocations: HostAllocations,
        host_draining: HostDraining,
        *,
        former: SavedRing | None,
        term: int,
        before_planning: Callable[[], Awaitable[None]],
        strikes: Counter[str] | None = None,
    ) -> None:
        self.on_decided: Callable[[], None] = _nothing
        self._model = model
        self._engine = model.engine
        self._pipeline = model.pipeline
        self._state = model.state
        self._head = head
        self._allocations = allocations
        self._host_draining = host_draining
        self._former = former
        self._term = term
        self._before_planning = before_planning
        self._allocation = allocations.open(
            model.name,
            model.pipeline,
            request_bytes=model.request_bytes,
            most_threads=model.most_threads,
            computes_at_times=model.computes_at_times,
            owner=model.owner,
        )
        self._maker = maker
        self._executor = PlacementExecutor(self._maker, self._allocation, head.members)
        self._strikes: Counter[str] = Counter() if strikes is None else strikes
        # What a host could not load, as against a file that cannot be sent to any host.
        self._refused: InvalidModel | None = None
        self._link: HostedLink | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self, on_served: Callable[[], None]) -> NoReturn:
        """Load the model and supervise it until cancelled. Afterwards no host holds it.

        Args:
            on_served: Called when requests are answered.

        Raises:
            MeshError: If a step fails. Once requests are answered, failures are recovered from.
        """
        try:
            if not await self._take_over():
                await self._before_planning()
                await self._connect(await self._load())
            self._announce("serving")
            on_served()
            async with CrashLogs(self._head.driver) as crash_logs:
                await first_of(self._engine.run(), self._supervise(crash_logs))
        finally:
            self._engine.give_up(ClusterError(f"the model {self._model.name} is not served any more"))
            # A model whose loading failed may be unloaded at this moment, too.
            await run_to_end(self._clean_up())
        raise StageFailed(f"{self._model.what} ended unexpectedly")

    async def _clean_up(self) -> None:
        await self._close_link()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._pipeline.stop()
        self._allocations.close(self._allocation)
        announce_layers(self._head, self._allocations)

    async def _load(self) -> tuple[PipelineStage, ...]:
        """Load the model on the best host; the pipeline keeps what it has.

        Raises:
            ModelDoesNotFit: With the memory that is needed and that each host has left.
            NotEnoughHosts: If there is no host.
            MeshError: If the host or its process is gone, has too little memory, or does not answer.
        """
        members = [each for each in self._head.members.ready if self._strikes[each.name] < _MOST_STRIKES]
        plan = self._model.place([self._allocation.capacity_of(each) for each in members])
        decision = Replan(tuple(map(NewStage, plan.stages)), (), plan.reason)
        # Nothing was awaited since the capacities were read: other models count this memory from here on.
        self._pipeline.intend(decision)
        self.on_decided()
        self._announce("loading")
        try:
            stages = await self._executor.load_stages(decision, (HiddenType.F32,), self._on_error)
        except BaseException:
            # An attempt that was cut short may have left a loaded process as a replica, which is of no use.
            for replica in tuple(self._pipeline.replicas):
                self._pipeline.drop_replica(replica)
            raise
        self._note(plan)
        return stages

    async def _connect(self, stages: tuple[PipelineStage, ...]) -> None:
        """Answer requests with a loaded process from now on.

        Args:
            stages: The process; the pipeline's from now on. It is ended if this fails.

        Raises:
            MeshError: If it does not answer.
        """
        credentials = new_ring_credentials(self._term)
        try:
            (at,) = await wire_up(stages, credentials, self._on_error)
            identity = self._head.authority.own_identity(["coordinator"], self._head.own.address)
            link = await self._model.answer_at(at.address, at.host, credentials.mesh_key, identity)
        except BaseException:
            for stage in stages:
                if stage.handle is not None:
                    stage.handle.kill()
            self._pipeline.intended = ()
            raise
        self._link = link
        self._pipeline.stages, self._pipeline.intended = stages, ()
        self._pipeline.credentials = credentials
        self._forget_failures()

    async def _supervise(self, crash_logs: CrashLogs) -> NoReturn:
        while True:
            loss = await self._loss_or_move()
            if loss is None:
                await self._move()
            else:
                await self._replace(loss, crash_logs)

    async def _loss_or_move(self) -> StageLoss | None:
        """Return when the process is lost, with the reason, or None when its host keeps no layers."""
        while True:
            (stage,) = self._pipeline.stages
            if stage.handle is None:
                return _HOST_LEFT
            member = next((each for each in self._head.members if stage.is_on(each)), None)
            if member is None:
                return _HOST_LEFT
            if not member.keeps_layers:
                return None
            fault = await self._fault_within(_POLL_S)
            (stage,) = self._pipeline.stages
            if stage.handle is None:
                continue
            if (loss := await stage.handle.loss(_PATIENCE_S)) is not None:
                return loss
            if fault is not None and not isinstance(fault, HostUnreachable):
                # It lives and stands still.
                return StageLoss(fault.message)
            if fault is not None and (loss := await self._reconnect()) is not None:
                return loss

    async def _fault_within(self, seconds: float) -> MeshError | None:
        """Wait, at most until hosts change; returns why the process did not answer a batch, if so."""
        broken = asyncio.create_task(self._engine.broken())
        changed = asyncio.create_task(self._head.members.changed())
        try:
            await asyncio.wait({broken, changed}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return broken.result() if broken.done() else None
        finally:
            for task in (broken, changed):
                task.cancel()
            await asyncio.gather(broken, changed, return_exceptions=True)

    async def _reconnect(self) -> StageLoss | None:
        """Connect to a process that lives, over a new channel; returns why that does not work."""
        await self._close_link()
        try:
            await self._connect(self._pipeline.stages)
        except MeshError as error:
            return StageLoss(error.message)
        log.info("process_reconnected", model=self._model.name)
        return None

    async def _replace(self, loss: StageLoss, crash_logs: CrashLogs) -> None:
        """Load the model elsewhere, in as many attempts as it takes; requests wait meanwhile, for a while."""
        started_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        self._engine.suspend()
        (stage,) = self._pipeline.stages
        if stage.handle is not None:
            host, layers = stage.placement.host, str(stage.placement.layers)
            log.error("process_lost", model=self._model.name, host=host, reason=loss.reason)
            failure = self._state.incidents.failed(host, layers, loss.reason)
            crash_logs.collect(self._state.incidents, failure, loss, stage.handle.member)
            self._pipeline.mark_lost(0)
        await self._close_link()
        self._announce("repairing")
        while True:
            try:
                await self._connect(await self._load())
                break
            except MeshError as error:
                final = self._final(error)
                if final is not None and self._model.can_do_without:
                    raise final from None
                if final is not None:
                    # A file that was replaced may be put back.
                    awaited = "the model" if isinstance(final, InvalidModel) else "hosts"
                    self._engine.give_up(StageFailed(final.message, retry_after_s=_RETRY_AFTER_S))
                    self._announce(f"waiting for {awaited}: {final.message}")
                    self._forget_failures()
                    await self._head.members.change_within(_RETRY_S)
                else:
                    log.warning("repair_goes_on", model=self._model.name, reason=error.message)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        took_s = time.monotonic() - started_s
        self._state.incidents.repaired(took_s)
        log.info("repaired", model=self._model.name, seconds=round(took_s, 3))
        self._announce("serving")

    async def _move(self) -> None:
        """Make before break: load the model on another host while this one answers, then change over."""
        (stage,), link = self._pipeline.stages, self._link
        try:
            await self._connect(await self._load())
        except MeshError as error:
            final = self._final(error)
            if final is not None and self._model.can_do_without:
                raise final from None
            if final is not None:
                self._host_draining.report_stuck(stage.placement.host, final.message)
                self._forget_failures()
                await self._head.members.change_within(_POLL_S)
            else:
                log.warning("move_failed", model=self._model.name, reason=error.message)
                await asyncio.sleep(_POLL_S)
        else:
            self._in_background(_retired(link, stage.handle))
            self._state.incidents.moved()
        self._announce("serving")

    def _final(self, error: MeshError) -> MeshError | None:
        """Reason why no host can load the model now, if an attempt showed that; None if another may do."""
        if isinstance(error, (ModelDoesNotFit, NotEnoughHosts)):
            # Hosts that could not load the file may have been left out.
            return self._refused or error
        return error if isinstance(error, InvalidModel) and error is not self._refused else None

    def _forget_failures(self) -> None:
        self._strikes.clear()
        self._refused = None

    async def _take_over(self) -> bool:
        """Take over the process of a former head, and answer with it; returns whether that worked.

        However it ends otherwise, the process is not left.
        """
        former, is_taken_over = self._former, False
        if former is None or not former.stages:
            return False
        self._announce("taking over")
        try:
            await self._connect((await self._adopted(former),))
            is_taken_over = True
        except MeshError as error:
            log.warning("stage_not_taken_over", stage=former.stages[0].actor, reason=error.message)
        finally:
            self._pipeline.intended = ()
            if not is_taken_over:
                end_ring(self._head.driver, former)
        if is_taken_over:
            self._note(Plan(self._pipeline.placements, "as before"))
            log.info("stages_taken_over", model=self._model.name, stages=1, copies=0)
        return is_taken_over

    async def _adopted(self, former: SavedRing) -> PipelineStage:
        """The process of a former head.

        Raises:
            MeshError: If it is not what would be loaded now, or does not run.
        """
        saved, layers = former.stages[0], self._model.layers
        if former.setup != self._model.setup:
            raise StageFailed("the model or its options have changed")
        if (fault := ring_fault(former.stages, len(layers))) is not None or len(former.stages) > 1:
            raise StageFailed(fault or f"{self._model.what} is not cut")
        # Until it is known whether it runs, its memory counts as used.
        self._pipeline.intended = (StagePlacement(saved.host, layers, self._model.memory),)
        member = await self._returned(saved)
        await self._maker.describe([(member.name, layers)])
        memory = self._model.memory_on(self._allocation.capacity_of(member)) or self._model.memory
        placement = StagePlacement(member.name, layers, memory)
        handle = await adopted(
            self._maker.make(placement, member, wire=HiddenType.F32, num_threads=saved.num_threads), saved
        )
        return PipelineStage(replace(placement, memory=handle.config.memory), HiddenType.F32, handle)

    async def _returned(self, saved: SavedStage) -> Member:
        """The host of a former process, once it has found this head.

        Raises:
            StageFailed: If it does not return in time; see `returned_host`.
        """
        members = self._head.members
        try:
            async with asyncio.timeout(_WAIT_FOR_HOST_S):
                while all(member.ray_node_name != saved.ray_node for member in members.ready):
                    await members.changed()
        except TimeoutError:
            log.warning("hosts_missing", hosts=[saved.ray_node])
        return returned_host(self._head, saved)

    def _on_error(self, handle: StageHandle, error: MeshError) -> None:
        self._strikes[handle.member.name] += 1
        if isinstance(error, InvalidModel):
            self._refused = error
        log_stage_error(handle, error)

    async def _close_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what nothing waits for."""
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _note(self, plan: Plan) -> None:
        self._state.plan_reason = plan.reason
        self._allocation.noted = plan.stages
        announce_layers(self._head, self._allocations)
        hosts = [stage.host for stage in plan.stages]
        log.info("planned", model=self._model.name, stages=1, reason=plan.reason, hosts=hosts)

    def _announce(self, phase: str) -> None:
        if phase != self._state.phase:
            self._state.phase = phase
            log.info("phase", phase=phase, model=self._model.name)
            self._head.service.announce_to_all(f"{self._model.name}: {phase}")


def _nothing() -> None:
    """Does nothing."""


async def _retired(link: HostedLink | None, handle: StageHandle | None) -> None:
    """End a process that was replaced, when its batches under way are computed."""
    if link is not None:
        await link.retire()
    if handle is not None:
        await handle.stop()
