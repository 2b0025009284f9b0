"""From an open head to a served model, step by step."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NoReturn

import structlog

from mesh.cluster.links import LinkWish
from mesh.coordinator import Coordinator, CoordinatorOptions
from mesh.interruption import first_of
from mesh.planner import HostCapacity, Plan, plan
from mesh.serve.announce import print_join_line
from mesh.serve.cutting import cut_stages
from mesh.serve.link_order import by_links, round_times
from mesh.serve.measured_links import HIDDEN_VALUE_BYTES
from mesh.serve.mesh_keys import MeshKeys, new_mesh_keys
from mesh.serve.preflight import own_capacity
from mesh.serve.stage_actors import StageActors
from mesh.serve.wires import planned_wires
from mesh.stage_sizes import StageSizes
from spanmesh_proto.errors import StageFailed
from stages.actor import StageConfig
from stages.hidden_codec import HiddenType
from stages.numerics import numerics_for
from stages.runtime import RuntimeOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from mesh.cluster.members import Member
    from mesh.coordinator import StageAddress
    from mesh.serve.head import Head
    from mesh.serve.options import ServeOptions
    from mesh.serve.preflight import Preflight
    from mesh.serve.proposers import Proposers
    from mesh.serve.state import MeshState
    from stages.cutting import StageCache, StageFile

log = structlog.get_logger()

_WATCH_S: Final = 0.5
# Round trips of each size on each link before the stages are placed.
_NUM_PROBES: Final = 6
# Sent over each link for its bandwidth: more than fits into the first round trips of a connection.
_BULK_BYTES: Final = 256 * 1024
# A round through fewer hosts, the head among them, is the same in any order.
_FEWEST_FOR_AN_ORDER: Final = 4


class Bringup:
    """Hosts, plan, stage files, actors, ring.

    Args:
        options: What the user says.
        known: What was found out beforehand.
        state: Kept up to date; its engine answers once the ring is connected.
        head: Open.
        cache: Of this host.
        proposers: Who proposes for a request; None if nobody does.
    """

    def __init__(
        self,
        options: ServeOptions,
        known: Preflight,
        state: MeshState,
        head: Head,
        cache: StageCache,
        *,
        proposers: Proposers | None,
    ) -> None:
        self._options = options
        self._known = known
        self._state = state
        self._head = head
        self._cache = cache
        self._proposers = proposers

    async def run(self, on_served: Callable[[], None]) -> NoReturn:
        """All steps, then stay until cancelled.

        Args:
            on_served: Called when requests are answered.

        Raises:
            MeshError: If a step fails, or a stage goes away.
        """
        await self._gather_hosts()
        placed = await self._plan()
        await first_of(self._serve(placed, on_served), self._watch_hosts(placed))
        raise StageFailed("the mesh ended by itself")

    async def _gather_hosts(self) -> None:
        wanted = self._options.num_hosts
        if wanted:
            print_join_line(self._head.token)
        while (missing := wanted - self._num_joined()) > 0:
            self._say(f"waiting for {missing} of {wanted} hosts")
            await self._head.members.changed()

    def _num_joined(self) -> int:
        own = self._head.own.ray_node_name
        return sum(member.ray_node_name != own for member in self._head.members.ready)

    async def _plan(self) -> Plan:
        hosts = [self._capacity_of(member) for member in self._head.members.ready]
        placed = self._placed(hosts)
        placed = await self._ordered_by_links(hosts, placed)
        self._state.plan = placed
        layers: dict[str, list[str]] = {}
        for stage in placed.stages:
            layers.setdefault(stage.host, []).append(str(stage.layers))
        for host, ranges in layers.items():
            self._head.members.update(host, layers=", ".join(ranges))
            self._head.service.announce(host, f"layers {', '.join(ranges)}")
        log.info("planned", stages=len(placed.stages), reason=placed.reason, hosts=layers)
        return placed

    def _placed(self, hosts: Sequence[HostCapacity]) -> Plan:
        return plan(
            self._known.model,
            hosts,
            self._known.workload,
            num_stages=self._options.num_stages,
            split=self._options.split,
        )

    async def _ordered_by_links(self, hosts: Sequence[HostCapacity], placed: Plan) -> Plan:
        """The plan again with its hosts in the order that makes a token's round shortest."""
        survey = self._head.survey
        chosen = tuple(dict.fromkeys(stage.host for stage in placed.stages))
        if len({survey.head, *chosen}) < _FEWEST_FOR_AN_ORDER:
            return placed
        self._say("measuring links")
        hidden_bytes = self._known.model.n_embd * HIDDEN_VALUE_BYTES
        links = await survey.measure(LinkWish(hidden_bytes, _NUM_PROBES))
        before = round_times(chosen, survey.head, links)
        if before is None:
            log.warning("links_unknown", hosts=chosen, consequence="stages stay in the order of joining")
            return placed
        ordered = self._placed(by_links(hosts, chosen, survey.head, links))
        order = tuple(dict.fromkeys(stage.host for stage in ordered.stages))
        after = round_times(order, survey.head, links)
        if after is None or after.order_ms >= before.order_ms:
            order, ordered, after = chosen, placed, before
        log.info(
            "ordered_by_links",
            hosts=order,
            round_ms=round(after.order_ms, 2),
            as_joined_ms=round(before.order_ms, 2),
        )
        return ordered

    async def _wires(self, placed: Plan) -> tuple[HiddenType, ...]:
        """How each stage's hidden states travel; `--wire auto` measures the links for it."""
        if self._options.wire is not None:
            return (self._options.wire,) * len(placed.stages)
        if len({stage.host for stage in placed.stages}) == 1:
            return (HiddenType.F32,) * len(placed.stages)
        self._say("measuring links")
        hidden_bytes = HiddenType.F32.row_bytes(self._known.model.n_embd)
        links = await self._head.survey.measure(LinkWish(hidden_bytes, _NUM_PROBES, _BULK_BYTES))
        choices = planned_wires(
            placed,
            StageSizes(self._known.model, self._known.workload),
            {member.name: member.facts.speed_gb_per_s for member in self._head.members},
            links,
        )
        log.info("wires_chosen", links=[choice.as_dict() for choice in choices if choice is not None])
        return tuple(HiddenType.F32 if choice is None else choice.proposed for choice in choices)

    def _capacity_of(self, member: Member) -> HostCapacity:
        if member.ray_node_name == self._head.own.ray_node_name:
            return own_capacity(member.name, self._known)
        return HostCapacity(member.name, member.facts.memory_bytes, member.facts.speed_gb_per_s)

    async def _serve(self, placed: Plan, on_served: Callable[[], None]) -> None:
        self._say("cutting")
        parts = [stage.layers for stage in placed.stages]
        files = await cut_stages(self._cache, self._options.model, parts)
        wires = await self._wires(placed)
        keys = new_mesh_keys(files)
        async with self._actors(placed, files, keys, wires) as actors:
            self._say("placing stages")
            await actors.place()
            self._say("loading")
            await actors.load()
            self._say("connecting")
            async with self._coordinator(await actors.connect(), keys) as coordinator:
                self._state.engine.coordinator = coordinator
                self._say("serving")
                on_served()
                while coordinator.is_ready:  # noqa: ASYNC110 - the coordinator has no event for it
                    await asyncio.sleep(_WATCH_S)
                raise StageFailed(
                    f"the ring is broken: {coordinator.status()['lost']}; start `mesh serve` again"
                )

    @asynccontextmanager
    async def _actors(
        self, placed: Plan, files: Sequence[StageFile], keys: MeshKeys, wires: Sequence[HiddenType]
    ) -> AsyncIterator[StageActors]:
        members = self._hosts_of(placed)
        num_stages_on = Counter(member.name for member in members)
        loading_bytes_on: Counter[str] = Counter()
        for stage in placed.stages:
            loading_bytes_on[stage.host] += stage.memory.loading_bytes
        configs = [
            StageConfig(
                stage_index=index,
                layers=file.layers,
                sha256=file.sha256,
                size_bytes=file.size_bytes,
                source=self._head.source,
                options=RuntimeOptions(
                    num_slots=self._known.workload.num_slots,
                    ctx_size=self._known.workload.ctx_size,
                    # They spin: stages of one host share its threads out.
                    num_threads=max(1, member.facts.num_threads // num_stages_on[member.name]),
                    exact=self._options.is_exact,
                    kv_type=self._known.workload.kv_type,
                ),
                host=stage.host,
                memory=stage.memory,
                beside_bytes=loading_bytes_on[stage.host] - stage.memory.loading_bytes,
                mesh_id=keys.mesh_id,
                mesh_key=keys.mesh_key,
                hidden_type=wire,
            )
            for index, (stage, file, member, wire) in enumerate(
                zip(placed.stages, files, members, wires, strict=True)
            )
        ]
        actors = StageActors(self._head.driver, configs, members, self._head.authority)
        try:
            yield actors
        finally:
            await actors.stop()

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
                max_waiting=self._options.max_waiting,
                controller=self._options.speculation.controller_options(),
                cancels=self._options.speculation.cancels,
            ),
            mesh_id=keys.mesh_id,
            mesh_key=keys.mesh_key,
            make_proposers=self._proposers,
            clock_s=time.monotonic,
            identity=self._head.authority.own_identity(["coordinator"], self._head.own.address),
        )
        try:
            await coordinator.start()
            yield coordinator
        finally:
            await coordinator.stop()

    def _hosts_of(self, placed: Plan) -> list[Member]:
        """The host of each stage.

        Raises:
            StageFailed: If one has left since the plan was made.
        """
        present = {member.name: member for member in self._head.members}
        for stage in placed.stages:
            if stage.host not in present:
                raise _left(stage.host, str(stage.layers))
        return [present[stage.host] for stage in placed.stages]

    async def _watch_hosts(self, placed: Plan) -> NoReturn:
        """Raise when a host that the plan needs leaves: Ray would notice later."""
        while True:
            self._hosts_of(placed)
            await self._head.members.changed()

    def _say(self, phase: str) -> None:
        if phase != self._state.phase:
            self._state.phase = phase
            log.info("phase", phase=phase)
            self._head.service.announce_to_all(phase)


def _left(host: str, layers: str) -> StageFailed:
    return StageFailed(f"host {host}, which holds layers {layers}, left the mesh; start `mesh serve` again")
