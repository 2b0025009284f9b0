"""Deployment of one model: hosts, plan, stages, ring and supervision."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NoReturn

import structlog

from mesh.placement.replanner import NewStage, Replan
from mesh.serve.failures import CrashLogs
from mesh.serve.head_failover import Takeover
from mesh.serve.model_coordinator import CoordinatorParts, new_coordinator
from mesh.serve.pipeline import PipelineStage, log_stage_error, wire_up
from mesh.serve.planning import InitialPlacement
from mesh.serve.reconfiguration import PlacementExecutor, make_recovery_context
from mesh.serve.replicas import ReplicaManager
from mesh.serve.stage_factory import StageMaker
from mesh.serve.stage_handle import new_ring_credentials
from mesh.serve.startup_message import print_join_line
from mesh.serve.supervisor import Supervisor
from mesh.util.tasks import first_of, run_to_end
from spanmesh_proto.errors import MeshError, ModelDoesNotFit, ModelError, NotEnoughHosts, StageFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from mesh.cluster.members import Member, Members
    from mesh.coordinator.coordinator import Coordinator
    from mesh.coordinator.ring import StageAddress
    from mesh.placement.context_choice import ContextChoice
    from mesh.placement.planner import Plan, StagePlacement
    from mesh.serve.allocations import HostAllocations
    from mesh.serve.head import Head
    from mesh.serve.head_state import SavedRing
    from mesh.serve.host_draining import HostDraining
    from mesh.serve.served_model import ServedModel
    from mesh.serve.stage_handle import RingCredentials
    from stages.weights.virtual_stages import StageCache

# A host that is gone is noticed within 4 s (see `mesh.cluster.members`). What it held may fail
# earlier.
_DEPARTURE_S: Final = 5.0
# Before the next placement: time for processes that are ending, and for hosts that are lost together.
_PAUSE_S: Final = 1.0
# Without a change among the hosts, a placement that did not fit is tried again after this time.
_RETRY_S: Final = 3.0

log = structlog.get_logger()


class HostWatch:
    """Watch over hosts that a placement counts on, until its ring is connected.

    Args:
        members: Hosts of the mesh.

    Attributes:
        gone: Name of the first host that left or is to leave; None while all are there.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._names: dict[str, str] = {}
        self.gone: str | None = None

    def keep_to(self, hosts: Iterable[Member]) -> None:
        """Watch these hosts from now on, and no others."""
        self._names = {host.ray_node_name: host.name for host in hosts}

    def look(self) -> bool:
        """Whether one of them is gone."""
        nodes = {member.ray_node_name for member in self._members if member.keeps_layers}
        for node, name in self._names.items():
            if self.gone is None and node not in nodes:
                self.gone = name
        return self.gone is not None

    async def departure(self) -> None:
        """Return when one of them is gone."""
        while not self.look():
            await self._members.changed()

    async def departure_within(self, timeout_s: float) -> bool:
        """Whether one of them is gone; if not, wait for that."""
        if self._names:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.departure()
        return self.gone is not None


class ModelDeployment:
    """Deployment of a model: places and loads its stages, connects the ring, then supervises it.

    Args:
        model: Its state is kept up to date; its engine answers once the ring is connected.
        head: The open head.
        cache: Stage files of this host.
        allocations: Allocations of all models; this model has one while it runs.
        host_draining: Hosts that are to leave.
        parts: What its coordinator works with.
        former: Ring of this model that the former head left, if there is one to take over.
        term: Term of this head.
        before_planning: Awaited unless stages are taken over: models with precedence place their stages
            first.

    Attributes:
        former: As given, until it is known whether it is taken over; None afterwards.
    """

    def __init__(
        self,
        model: ServedModel,
        head: Head,
        cache: StageCache,
        allocations: HostAllocations,
        host_draining: HostDraining,
        *,
        parts: CoordinatorParts,
        former: SavedRing | None,
        term: int,
        before_planning: Callable[[], Awaitable[None]],
    ) -> None:
        options, known = model.options, model.known
        self._model = model
        self._options = options
        self._known = known
        self._state = model.state
        self._head = head
        self._allocations = allocations
        self._host_draining = host_draining
        self._parts = parts
        self._pipeline = model.pipeline
        self._allocation = allocations.open(
            model.name,
            model.pipeline,
            draft_bytes=known.draft_bytes,
            request_bytes=known.request_bytes,
            most_threads=None if model.load_request is None else model.load_request.threads,
        )
        self._planning = InitialPlacement(options, known, head, self._allocation, self._announce)
        self._maker = StageMaker(options, known, head, cache, model.state.transfers)
        self._executor = PlacementExecutor(self._maker, self._allocation, head.members)
        self.former = former
        self._planned_ctx_size = known.workload.ctx_size
        self._term = term
        self._before_planning = before_planning
        self._num_placements_given_up = 0
        self._given_up_for = ""

    async def run(self, on_served: Callable[[], None]) -> NoReturn:
        """Run all steps, then supervise until cancelled. Afterwards no host holds a stage of the model.

        The first model of a mesh outlasts hosts that leave while it is loaded: it is placed again, once there
        are as many hosts again as the options ask for.

        Args:
            on_served: Called when requests are answered.

        Raises:
            MeshError: If a step fails for another reason, or if a host leaves while another model is loaded.
                Once requests are answered, failures are recovered from.
        """
        try:
            async with AsyncExitStack() as until_end:
                await self._serve(await self._connected(until_end), on_served)
        finally:
            # A model whose loading failed may be unloaded at this moment, too.
            await run_to_end(self._clean_up())
        raise StageFailed("the mesh ended unexpectedly")

    async def _clean_up(self) -> None:
        await self._pipeline.stop()
        self._allocations.close(self._allocation)
        if self._model.load_request is not None:
            announce_layers(self._head, self._allocations)

    async def _connected(self, until_end: AsyncExitStack) -> Coordinator:
        """Coordinator of the connected ring, in as many placements as it takes.

        Args:
            until_end: Stops the coordinator when it is closed.
        """
        is_loaded = await self._take_over()
        if self._model.load_request is not None:
            return await self._connected_at_last(until_end, is_loaded=is_loaded)
        # While there is no supervisor yet.
        async with self._host_draining.releasing():
            return await self._connected_at_last(until_end, is_loaded=is_loaded)

    async def _connected_at_last(self, until_end: AsyncExitStack, *, is_loaded: bool) -> Coordinator:
        is_line_printed = False
        while True:
            watch = HostWatch(self._head.members)
            try:
                if is_loaded:
                    self._watch(watch, (handle.member for handle in self._pipeline.handles))
                    return await self._loaded_and_connected(None, watch, until_end)
                if self._options.num_hosts and not is_line_printed:
                    print_join_line(self._head)
                    is_line_printed = True
                placed = await self._placed(watch)
                if placed is not None:
                    return await self._loaded_and_connected(placed, watch, until_end)
            except MeshError as error:
                # A ring that was taken over and cannot be connected is no reason not to serve.
                if not is_loaded and not await self._may_be_placed_again(error, watch):
                    raise
                await self._give_up_placement(error, watch)
            is_loaded = False

    async def _placed(self, watch: HostWatch) -> Plan | None:
        """Plan of the model, on the hosts that are there.

        Args:
            watch: Watches the hosts of the plan afterwards; all hosts before.

        Returns:
            None if a host has left meanwhile.
        """
        await self._gather_hosts()
        self._watch(watch, self._head.members.ready)
        await self._before_planning()
        initial = await self._planning.make()
        if watch.look() or self._missing_hosts():
            return None
        placed = initial.plan
        self._pipeline.intended = placed.stages
        names = {stage.host for stage in placed.stages}
        self._watch(watch, (member for member in self._head.members.ready if member.name in names))
        if initial.context is not None:
            self._note_context(initial.context)
        self._note_plan(placed.stages, placed.reason)
        return placed

    def _watch(self, watch: HostWatch, hosts: Iterable[Member]) -> None:
        """Watch these hosts, apart from this one."""
        watch.keep_to(host for host in hosts if not self._head.is_own(host))

    async def _loaded_and_connected(
        self, placed: Plan | None, watch: HostWatch, until_end: AsyncExitStack
    ) -> Coordinator:
        """Load the stages, unless they are loaded, and connect the ring.

        Raises:
            MeshError: If that fails, or a host of the plan leaves before.
        """
        connected: list[Coordinator] = []

        async def connect() -> None:
            if placed is not None:
                await self._load(placed)
            connected.append(await until_end.enter_async_context(self._ring()))

        await first_of(connect(), watch.departure())
        if connected:
            # A host that leaves from now on is the supervisor's business.
            return connected[0]
        remedy = "" if self._model.load_request is None else "; start `mesh load` again"
        raise StageFailed(f"host {watch.gone} left the mesh before its layers were loaded{remedy}")

    async def _may_be_placed_again(self, error: MeshError, watch: HostWatch) -> bool:
        """Whether an attempt failed because a host left, so that another placement may do.

        Args:
            error: Error of the attempt.
            watch: Hosts that the attempt counted on.
        """
        if self._model.load_request is not None:
            # The request for it is answered with the error.
            return False
        if isinstance(error, (ModelDoesNotFit, NotEnoughHosts)):
            return watch.look() or self._num_placements_given_up > 0
        if isinstance(error, ModelError):
            return watch.look()
        return await watch.departure_within(_DEPARTURE_S)

    async def _give_up_placement(self, error: MeshError, watch: HostWatch) -> None:
        """Free what was loaded, and wait before the next placement, so that there is no quick loop."""
        nodes = self._nodes_ready()
        self._num_placements_given_up += 1
        if error.message != self._given_up_for:
            self._given_up_for = error.message
            log.warning("placement_given_up", reason=error.message, host_left=watch.gone)
        await self._pipeline.stop()
        self._state.plan = self._state.context = None
        self._set_context(self._planned_ctx_size)
        self._allocation.noted = ()
        announce_layers(self._head, self._allocations)
        for member in self._host_draining.leaving:
            self._host_draining.release_if_free(member)
        await asyncio.sleep(_PAUSE_S)
        if isinstance(error, (ModelDoesNotFit, NotEnoughHosts)):
            self._announce(f"waiting for hosts: {error.message}")
            if self._nodes_ready() == nodes:
                await self._head.members.change_within(_RETRY_S)

    def _nodes_ready(self) -> frozenset[str]:
        return frozenset(member.ray_node_name for member in self._head.members.ready)

    async def _take_over(self) -> bool:
        try:
            return self.former is not None and await self._is_taken_over(self.former)
        finally:
            self.former = None

    async def _is_taken_over(self, former: SavedRing) -> bool:
        self._announce("taking over")
        if former.stages:
            # Its sessions count on the context that the ring was started with.
            self._set_context(former.stages[0].ctx_size or self._planned_ctx_size)
        takeover = Takeover(
            self._known,
            self._head,
            self._maker,
            self._pipeline,
            self._model.setup,
            capacity_of=self._allocation.capacity_of,
        )
        if not await takeover.run(former):
            self._set_context(self._planned_ctx_size)
            return False
        self._note_plan(self._pipeline.placements, "as before")
        return True

    async def _gather_hosts(self) -> None:
        while missing := self._missing_hosts():
            self._announce(f"waiting for {missing}")
            await self._head.members.changed()

    def _missing_hosts(self) -> str:
        """Hosts that the options ask for and that are not there; empty if none is missing."""
        topology = self._options.topology
        if topology is not None:
            names = topology.missing(member.name for member in self._head.members.ready)
            return f"{', '.join(names)}, to which the topology locks layers" if names else ""
        wanted = self._options.num_hosts
        missing = wanted - self._num_joined()
        return f"{missing} of {wanted} hosts" if missing > 0 else ""

    def _num_joined(self) -> int:
        own = self._head.own.ray_node_name
        return sum(member.ray_node_name != own for member in self._head.members.ready)

    async def _load(self, placed: Plan) -> None:
        wires = await self._planning.wires(placed)
        self._pipeline.stages = tuple(
            PipelineStage(stage, wire) for stage, wire in zip(placed.stages, wires, strict=True)
        )
        self._announce("loading")
        everything = Replan(tuple(NewStage(stage) for stage in placed.stages), (), placed.reason)
        self._pipeline.stages = await self._executor.load_stages(everything, wires, log_stage_error)
        self._pipeline.intended = ()

    @asynccontextmanager
    async def _ring(self) -> AsyncIterator[Coordinator]:
        """Context in which the loaded stages are a ring, with its coordinator."""
        self._announce("connecting")
        credentials = new_ring_credentials(self._term)
        addresses = await wire_up(self._pipeline.stages, credentials, log_stage_error)
        self._pipeline.credentials = credentials
        async with self._coordinator(addresses, credentials) as coordinator:
            yield coordinator

    async def _serve(self, coordinator: Coordinator, on_served: Callable[[], None]) -> None:
        head, pipeline, state = self._head, self._pipeline, self._state
        async with CrashLogs(head.driver) as crash_logs:
            context = make_recovery_context(
                self._known,
                head,
                pipeline,
                self._executor,
                coordinator,
                term=self._term,
                capacity_of=self._allocation.capacity_of,
                incidents=state.incidents,
                on_failure=lambda *what: crash_logs.collect(state.incidents, *what),
                on_plan=self._note_plan,
                announce=self._announce,
                topology=self._options.topology,
            )
            replica_manager = ReplicaManager(
                pipeline,
                self._maker,
                head.members,
                context.sizes,
                capacity_of=self._allocation.capacity_for_replicas,
                threads_of=self._allocation.threads_of,
                clock_s=time.monotonic,
                are_wanted=self._options.topology is None,
            )
            state.engine.coordinator = coordinator
            self._announce("serving")
            on_served()
            try:
                await Supervisor(context, replica_manager, self._host_draining).run()
            finally:
                await context.cutover.close()

    @asynccontextmanager
    async def _coordinator(
        self, stages: Sequence[StageAddress], credentials: RingCredentials
    ) -> AsyncIterator[Coordinator]:
        coordinator = new_coordinator(
            stages,
            self._options,
            self._known,
            parts=self._parts,
            credentials=credentials,
            identity=self._head.authority.own_identity(["coordinator"], self._head.own.address),
        )
        try:
            await coordinator.start()
            yield coordinator
        finally:
            await coordinator.stop()

    def _note_context(self, chosen: ContextChoice) -> None:
        self._set_context(chosen.ctx_size)
        self._state.context = chosen
        larger = chosen.larger
        log.info(
            "context_chosen",
            positions=chosen.ctx_size,
            sessions=chosen.num_slots,
            bound=chosen.bound,
            larger=None if larger is None else str(larger),
            **self._log_fields,
        )

    def _set_context(self, ctx_size: int) -> None:
        """Set the positions of one session, before any stage is made."""
        workload = replace(self._known.workload, ctx_size=ctx_size)
        self._known = replace(self._known, workload=workload)
        self._maker.workload = workload
        self._state.engine.context_length = ctx_size

    def _note_plan(self, stages: Sequence[StagePlacement], reason: str) -> None:
        self._state.note_plan(stages, reason)
        self._allocation.noted = tuple(stages)
        if self._options.exact and self._allocation.attention_version is None:
            first = self._head.members.find(stages[0].host)
            if first is not None:
                self._allocation.attention_version = first.facts.attention_version
        announce_layers(self._head, self._allocations)
        layers: dict[str, list[str]] = {member.name: [] for member in self._head.members}
        for stage in stages:
            layers.setdefault(stage.host, []).append(str(stage.layers))
        log.info("planned", stages=len(stages), reason=reason, hosts=layers, **self._log_fields)

    @property
    def _log_fields(self) -> dict[str, str]:
        """Log fields: the model, if it is not the first."""
        return {} if self._model.load_request is None else {"model": self._model.name}

    def _announce(self, phase: str) -> None:
        if phase != self._state.phase:
            self._state.phase = phase
            log.info("phase", phase=phase, **self._log_fields)
            told = phase if self._model.load_request is None else f"{self._model.name}: {phase}"
            self._head.service.announce_to_all(told)


def announce_layers(head: Head, allocations: HostAllocations) -> None:
    """Announce to every host the layers that it holds, of all models."""
    for member in head.members:
        held = allocations.layers_on(member.name)
        if held != member.layers:
            head.members.update(member.name, layers=held)
            head.service.announce(member.name, f"layers {held}" if held else "no layers")
