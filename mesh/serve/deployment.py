"""Deployment of one model: hosts, plan, stages, ring and supervision."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import structlog

from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.placement.replanner import NewStage, Replan
from mesh.serve.failures import CrashLogs
from mesh.serve.head_failover import Takeover
from mesh.serve.pipeline import PipelineStage
from mesh.serve.planning import InitialPlacement
from mesh.serve.reconfiguration import PlacementExecutor, make_recovery_context
from mesh.serve.replicas import ReplicaManager
from mesh.serve.stage_factory import StageMaker
from mesh.serve.stage_group import log_stage_error, wire_up
from mesh.serve.stage_handle import new_ring_credentials
from mesh.serve.status import print_join_line
from mesh.serve.supervisor import Supervisor
from mesh.util.tasks import first_of, run_to_end
from spanmesh_proto.errors import StageFailed
from stages.runtime.numerics import numerics_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from mesh.coordinator.ring import StageAddress
    from mesh.placement.context_choice import ContextChoice
    from mesh.placement.planner import Plan, StagePlacement
    from mesh.placement.topology import Topology
    from mesh.serve.allocations import HostAllocations
    from mesh.serve.head import Head
    from mesh.serve.head_state import SavedRing
    from mesh.serve.host_draining import HostDraining
    from mesh.serve.proposers import Proposers
    from mesh.serve.served_model import ServedModel
    from mesh.serve.stage_handle import RingCredentials
    from stages.weights.virtual_stages import StageCache

log = structlog.get_logger()


def announce_layers(head: Head, allocations: HostAllocations) -> None:
    """Announce to every host the layers that it holds, of all models."""
    for member in head.members:
        held = allocations.layers_on(member.name)
        if held != member.layers:
            head.members.update(member.name, layers=held)
            head.service.announce(member.name, f"layers {held}" if held else "no layers")


class ModelDeployment:
    """Deployment of a model: places and loads its stages, connects the ring, then supervises it.

    Args:
        model: Its state is kept up to date; its engine answers once the ring is connected.
        head: The open head.
        cache: Stage files of this host.
        allocations: Allocations of all models; this model has one while it runs.
        host_draining: Hosts that are to leave.
        proposers: Proposers for each request; None for plain decoding.
        former: Ring of this model that the former head left, if there is one to take over.
        term: Term of this head.
        before_planning: Awaited unless stages are taken over: models with precedence place their stages
            first.
    """

    def __init__(
        self,
        model: ServedModel,
        head: Head,
        cache: StageCache,
        allocations: HostAllocations,
        host_draining: HostDraining,
        *,
        proposers: Proposers | None,
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
        self._proposers = proposers
        self._pipeline = model.pipeline
        self._allocation = allocations.open(
            model.name,
            model.pipeline,
            draft_bytes=known.draft_bytes,
            most_threads=None if model.load_request is None else model.load_request.threads,
        )
        self._planning = InitialPlacement(options, known, head, self._allocation, self._announce)
        self._maker = StageMaker(options, known, head, cache, model.state.transfers)
        self._executor = PlacementExecutor(self._maker, self._allocation, head.members)
        self._former = former
        self._term = term
        self._before_planning = before_planning

    async def run(self, on_served: Callable[[], None]) -> NoReturn:
        """Run all steps, then supervise until cancelled. Afterwards no host holds a stage of the model.

        Args:
            on_served: Called when requests are answered.

        Raises:
            MeshError: If a step fails. Once requests are answered, failures are recovered from.
        """
        try:
            await self._run(on_served)
        finally:
            # A model whose loading failed may be unloaded at this moment, too.
            await run_to_end(self._clean_up())
        raise StageFailed("the mesh ended unexpectedly")

    async def _clean_up(self) -> None:
        await self._pipeline.stop()
        self._allocations.close(self._allocation)
        if self._model.load_request is not None:
            announce_layers(self._head, self._allocations)

    async def _run(self, on_served: Callable[[], None]) -> None:
        if not await self._take_over():
            await self._gather_hosts()
            await self._before_planning()
            initial = await self._planning.make()
            placed = initial.plan
            self._pipeline.intended = placed.stages
            if initial.context is not None:
                self._note_context(initial.context)
            self._note_plan(placed.stages, placed.reason)
            await first_of(self._load(placed), self._watch_hosts(placed))
        await self._serve(on_served)

    async def _take_over(self) -> bool:
        former = self._former
        if former is None:
            return False
        self._announce("taking over")
        planned = self._known.workload.ctx_size
        if former.stages:
            # Its sessions count on the context that the ring was started with.
            self._set_context(former.stages[0].ctx_size or planned)
        takeover = Takeover(
            self._known,
            self._head,
            self._maker,
            self._pipeline,
            self._model.setup,
            capacity_of=self._allocation.capacity_of,
        )
        if not await takeover.run(former):
            self._set_context(planned)
            return False
        self._note_plan(self._pipeline.placements, "as before")
        return True

    async def _gather_hosts(self) -> None:
        wanted = self._options.num_hosts
        if wanted:
            print_join_line(self._head)
        topology = self._options.topology
        if topology is not None:
            await self._gather_named_hosts(topology)
            return
        while (missing := wanted - self._num_joined()) > 0:
            self._announce(f"waiting for {missing} of {wanted} hosts")
            await self._head.members.changed()

    async def _gather_named_hosts(self, topology: Topology) -> None:
        while missing := topology.missing(member.name for member in self._head.members.ready):
            self._announce(f"waiting for {', '.join(missing)}, to which the topology locks layers")
            await self._head.members.changed()

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

    async def _serve(self, on_served: Callable[[], None]) -> None:
        head, pipeline, state = self._head, self._pipeline, self._state
        self._announce("connecting")
        credentials = new_ring_credentials(self._term)
        addresses = await wire_up(pipeline.stages, credentials, log_stage_error)
        pipeline.credentials = credentials
        async with (
            self._coordinator(addresses, credentials) as coordinator,
            CrashLogs(head.driver) as crash_logs,
        ):
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
        coordinator = Coordinator(
            stages,
            CoordinatorOptions(
                context_length=self._known.workload.ctx_size,
                num_slots=self._known.workload.num_slots,
                max_rows=numerics_for(exact=self._options.is_exact, num_threads=1).max_rows,
                n_vocab=self._known.tokenizer.n_vocab,
                token_texts=lambda: self._known.tokenizer.texts,
                max_waiting=self._options.max_waiting,
                controller=self._options.speculation.controller_options(),
                can_trim=self._known.model.can_trim,
                has_windows=self._known.model.has_windows,
                num_checkpoints=self._known.workload.num_checkpoints,
                cancels=self._options.speculation.cancels,
                feature_needs=None if self._proposers is None else self._proposers.feature_needs,
                num_groups=self._options.num_groups,
            ),
            mesh_id=credentials.mesh_id,
            mesh_key=credentials.mesh_key,
            make_proposers=self._proposers,
            clock_s=time.monotonic,
            identity=self._head.authority.own_identity(["coordinator"], self._head.own.address),
            term=self._term,
        )
        try:
            await coordinator.start()
            yield coordinator
        finally:
            await coordinator.stop()

    async def _watch_hosts(self, placed: Plan) -> NoReturn:
        """Raise when a host of the plan leaves before everything is loaded."""
        while True:
            present = {member.name for member in self._head.members.ready}
            for stage in placed.stages:
                if stage.host not in present:
                    command = "mesh serve" if self._model.load_request is None else "mesh load"
                    raise StageFailed(
                        f"host {stage.host}, which was to hold layers {stage.layers}, left the mesh; start "
                        f"`{command}` again"
                    )
            await self._head.members.changed()

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
