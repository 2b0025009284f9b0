"""Deployment of one model: hosts, plan, stages, ring and supervision."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NoReturn

import structlog

from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.placement.replanner import NewStage, Replan
from mesh.serve.failures import LastWords
from mesh.serve.head_failover import Takeover
from mesh.serve.pipeline import Seat
from mesh.serve.planning import FirstPlan
from mesh.serve.reconfiguration import Placer, make_crew
from mesh.serve.replicas import Spares
from mesh.serve.stage_factory import StageMaker
from mesh.serve.stage_group import note_trouble, wire_up
from mesh.serve.stage_handle import new_mesh_keys
from mesh.serve.status import print_join_line
from mesh.serve.supervisor import Tending
from mesh.util.tasks import first_of
from spanmesh_proto.errors import StageFailed
from stages.runtime.numerics import numerics_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from mesh.coordinator.ring import StageAddress
    from mesh.placement.planner import Plan, StagePlacement
    from mesh.placement.topology import Topology
    from mesh.serve.allocations import Ledger
    from mesh.serve.head import Head
    from mesh.serve.head_state import KeptRing
    from mesh.serve.host_draining import Departures
    from mesh.serve.proposers import Proposers
    from mesh.serve.served_model import ServedModel
    from mesh.serve.stage_handle import MeshKeys
    from stages.weights.stage_cache import StageCache

log = structlog.get_logger()


class Bringup:
    """Hosts, plan, stage files, actors, ring; then whatever keeps it whole.

    Args:
        model: Its state is kept up to date; its engine answers once the ring is connected.
        head: Open.
        cache: Of this host.
        ledger: Of all models; this one has its account there while it runs.
        departures: Hosts that are to leave.
        proposers: Who proposes for a request; None if nobody does.
        former: What the head before left of this model, if anything can be taken over.
        term: Of this head.
        before_planning: Awaited unless stages are taken over: whoever has precedence.
    """

    def __init__(
        self,
        model: ServedModel,
        head: Head,
        cache: StageCache,
        ledger: Ledger,
        departures: Departures,
        *,
        proposers: Proposers | None,
        former: KeptRing | None,
        term: int,
        before_planning: Callable[[], Awaitable[None]],
    ) -> None:
        options, known = model.options, model.known
        self._model = model
        self._options = options
        self._known = known
        self._state = model.state
        self._head = head
        self._ledger = ledger
        self._departures = departures
        self._proposers = proposers
        self._fleet = model.fleet
        self._account = ledger.open(
            model.name,
            model.fleet,
            draft_bytes=known.draft_bytes,
            most_threads=None if model.order is None else model.order.threads,
        )
        self._planning = FirstPlan(options, known, head, self._account, self._say)
        self._maker = StageMaker(options, known, head, cache, model.state.transfers)
        self._placer = Placer(self._maker, self._account, head.members)
        self._former = former
        self._term = term
        self._before_planning = before_planning

    async def run(self, on_served: Callable[[], None]) -> NoReturn:
        """All steps, then stay until cancelled. Afterwards nothing of the model is left on any host.

        Args:
            on_served: Called when requests are answered.

        Raises:
            MeshError: If a step fails. Once requests are answered, what fails is repaired.
        """
        try:
            await self._run(on_served)
        finally:
            await self._fleet.stop()
            self._ledger.close(self._account)
            if self._model.order is not None:
                self._tell_layers()
        raise StageFailed("the mesh ended by itself")

    async def _run(self, on_served: Callable[[], None]) -> None:
        if not await self._take_over():
            await self._gather_hosts()
            await self._before_planning()
            placed = await self._planning.make()
            self._fleet.intended = placed.stages
            self._note_plan(placed.stages, placed.reason)
            await first_of(self._load(placed), self._watch_hosts(placed))
        await self._serve(on_served)

    async def _take_over(self) -> bool:
        former = self._former
        if former is None:
            return False
        self._say("taking over")
        takeover = Takeover(
            self._known,
            self._head,
            self._maker,
            self._fleet,
            self._model.setup,
            capacity_of=self._account.capacity_of,
        )
        if not await takeover.run(former):
            return False
        self._note_plan(self._fleet.placements, "as before")
        return True

    async def _gather_hosts(self) -> None:
        wanted = self._options.num_hosts
        if wanted:
            print_join_line(self._head.token)
        topology = self._options.topology
        if topology is not None:
            await self._gather_named_hosts(topology)
            return
        while (missing := wanted - self._num_joined()) > 0:
            self._say(f"waiting for {missing} of {wanted} hosts")
            await self._head.members.changed()

    async def _gather_named_hosts(self, topology: Topology) -> None:
        while missing := topology.missing(member.name for member in self._head.members.ready):
            self._say(f"waiting for {', '.join(missing)}, to which the topology locks layers")
            await self._head.members.changed()

    def _num_joined(self) -> int:
        own = self._head.own.ray_node_name
        return sum(member.ray_node_name != own for member in self._head.members.ready)

    async def _load(self, placed: Plan) -> None:
        wires = await self._planning.wires(placed)
        self._fleet.seats = tuple(Seat(stage, wire) for stage, wire in zip(placed.stages, wires, strict=True))
        self._say("loading")
        everything = Replan(tuple(NewStage(stage) for stage in placed.stages), (), placed.reason)
        self._fleet.seats = await self._placer.fill(everything, wires, note_trouble)
        self._fleet.intended = ()

    async def _serve(self, on_served: Callable[[], None]) -> None:
        head, fleet, state = self._head, self._fleet, self._state
        self._say("connecting")
        keys = new_mesh_keys(self._term)
        addresses = await wire_up(fleet.seats, keys, note_trouble)
        fleet.keys = keys
        async with self._coordinator(addresses, keys) as coordinator, LastWords(head.driver) as last_words:
            crew = make_crew(
                self._known,
                head,
                fleet,
                self._placer,
                coordinator,
                term=self._term,
                capacity_of=self._account.capacity_of,
                incidents=state.incidents,
                on_failure=lambda *what: last_words.look_up(state.incidents, *what),
                on_plan=self._note_plan,
                say=self._say,
                topology=self._options.topology,
            )
            spares = Spares(
                fleet,
                self._maker,
                head.members,
                crew.sizes,
                capacity_of=self._account.capacity_for_copies,
                threads_of=self._account.threads_of,
                clock_s=time.monotonic,
                are_wanted=self._options.topology is None,
            )
            state.fleet = fleet
            state.departures = self._departures
            state.engine.coordinator = coordinator
            self._say("serving")
            on_served()
            try:
                await Tending(crew, spares, self._departures).run()
            finally:
                await crew.switch.close()

    @asynccontextmanager
    async def _coordinator(
        self, stages: Sequence[StageAddress], keys: MeshKeys
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
                cancels=self._options.speculation.cancels,
            ),
            mesh_id=keys.mesh_id,
            mesh_key=keys.mesh_key,
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
        """Raise when a host that the plan needs leaves before everything is loaded."""
        while True:
            present = {member.name for member in self._head.members.ready}
            for stage in placed.stages:
                if stage.host not in present:
                    command = "mesh serve" if self._model.order is None else "mesh load"
                    raise StageFailed(
                        f"host {stage.host}, which was to hold layers {stage.layers}, left the mesh; start "
                        f"`{command}` again"
                    )
            await self._head.members.changed()

    def _note_plan(self, stages: Sequence[StagePlacement], reason: str) -> None:
        self._state.note_plan(stages, reason)
        self._account.noted = tuple(stages)
        self._tell_layers()
        layers: dict[str, list[str]] = {member.name: [] for member in self._head.members}
        for stage in stages:
            layers.setdefault(stage.host, []).append(str(stage.layers))
        log.info("planned", stages=len(stages), reason=reason, hosts=layers, **self._which)

    def _tell_layers(self) -> None:
        """Every host hears when what it holds has changed, of any model."""
        for member in self._head.members:
            held = self._ledger.layers_on(member.name)
            if held != member.layers:
                self._head.members.update(member.name, layers=held)
                self._head.service.announce(member.name, f"layers {held}" if held else "no layers")

    @property
    def _which(self) -> dict[str, str]:
        """For the log: which model, where it is not the first."""
        return {} if self._model.order is None else {"model": self._model.name}

    def _say(self, phase: str) -> None:
        if phase != self._state.phase:
            self._state.phase = phase
            log.info("phase", phase=phase, **self._which)
            told = phase if self._model.order is None else f"{self._model.name}: {phase}"
            self._head.service.announce_to_all(told)
