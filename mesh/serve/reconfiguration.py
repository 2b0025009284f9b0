"""Reconfiguration of a pipeline: a replan carried out, and the cutover to a new ring."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import structlog

from mesh.placement.replanner import Copy, replan
from mesh.placement.stage_sizes import StageSizes
from mesh.serve.pipeline import Seat
from mesh.serve.planning import agreed, is_room_as_before
from mesh.serve.stage_group import load_all, wire_up
from mesh.serve.stage_handle import new_mesh_keys
from mesh.util.tasks import first_of
from spanmesh_proto.errors import ClusterError, StageFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from mesh.cluster.members import Member, Members
    from mesh.coordinator.coordinator import Coordinator
    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.planner import StagePlacement
    from mesh.placement.replanner import NewStage, Replan
    from mesh.placement.topology import Topology
    from mesh.serve.allocations import Account, InTheWay
    from mesh.serve.failures import Failure, Incidents
    from mesh.serve.head import Head
    from mesh.serve.pipeline import Fleet
    from mesh.serve.preflight import Preflight
    from mesh.serve.stage_factory import StageMaker
    from mesh.serve.stage_group import Blame
    from mesh.serve.stage_handle import StageHandle, StageLoss
    from spanmesh_proto.errors import MeshError
    from stages.transport.hidden_codec import HiddenType


log = structlog.get_logger()


class Placer:
    """Fills the seats of a ring.

    Args:
        maker: Makes stages.
        account: What there is, and what hosts have left for it.
        members: Hosts.
    """

    def __init__(self, maker: StageMaker, account: Account, members: Members) -> None:
        self._maker = maker
        self._account = account
        self._fleet = account.fleet
        self._members = members

    async def fill(
        self,
        decision: Replan,
        wires: Sequence[HiddenType],
        blame: Blame,
    ) -> tuple[Seat, ...]:
        """Have every stage of the new ring loaded.

        What was loaded when this fails stays as a copy, for the next try.

        Args:
            decision: What is to be where.
            wires: How hidden states travel from each stage of it to the next.
            blame: Called with each stage that could not be loaded, and why.

        Returns:
            The new ring; the fleet's is still the old one.

        Raises:
            MeshError: If a host or a process is gone, has no room, or does not answer.
        """
        fleet = self._fleet
        fleet.intend(decision)
        fresh: dict[int, StageHandle] = {}
        try:
            await self._make_room(decision)
            await self._maker.describe(
                (new.placement.host, new.placement.layers) for new in decision.stages if _is_fresh(new)
            )
            fresh = self._fresh(decision, wires)
            fleet.loading = tuple(fresh.values())
            await first_of(load_all(fleet.loading, blame), self._watch(fleet.loading))
            return tuple(
                Seat(new.placement, wire, fresh.get(index) or self._old(new))
                for index, (new, wire) in enumerate(zip(decision.stages, wires, strict=True))
            )
        except BaseException:
            for handle in fresh.values():
                if handle.is_loaded:
                    fleet.copies.append(handle)
                else:
                    handle.kill()
            fleet.intended = ()
            raise
        finally:
            fleet.loading = ()

    async def _watch(self, handles: Sequence[StageHandle]) -> NoReturn:
        """Raise when a host leaves that something is being loaded on: its processes may be out of reach."""
        while True:
            nodes = {member.ray_node_name for member in self._members}
            for handle in handles:
                if handle.member.ray_node_name not in nodes:
                    raise StageFailed(f"{handle.who} cannot be loaded: its host left")
            await self._members.changed()

    def _old(self, new: NewStage) -> StageHandle | None:
        if new.kept is not None:
            return self._fleet.seats[new.kept].handle
        return self._fleet.take_copy(Copy(new.placement.host, new.placement.layers))

    def _fresh(self, decision: Replan, wires: Sequence[HiddenType]) -> dict[int, StageHandle]:
        """Stages to be loaded, by their place in the ring."""
        members = {member.name: member for member in self._members}
        staying = Counter[str]()
        sharing = Counter[str]()
        for new in decision.stages:
            host = new.placement.host
            if new.kept is not None:
                handle = self._fleet.seats[new.kept].handle
                staying[host] += 0 if handle is None else handle.config.options.num_threads
            elif _is_fresh(new):
                sharing[host] += 1
        fresh = {}
        for index, (new, wire) in enumerate(zip(decision.stages, wires, strict=True)):
            if not _is_fresh(new):
                continue
            member = _present(members, new)
            host = member.name
            fresh[index] = self._maker.make(
                new.placement,
                member,
                wire=wire,
                # They spin: stages of one host share out what of its threads nobody has.
                num_threads=max(1, (self._account.threads_of(member) - staying[host]) // sharing[host]),
                beside=[
                    other.placement.memory
                    for other in decision.stages
                    if other is not new and other.placement.host == host and _is_fresh(other)
                ],
            )
        return fresh

    async def _make_room(self, decision: Replan) -> None:
        """End what is in the way, and wait until its memory is free."""
        fleet = self._fleet
        going = [fleet.take_copy(copy) for copy in decision.dropped]
        if decision.starts_over:
            kept = {new.kept for new in decision.stages}
            given_up = [seat for index, seat in enumerate(fleet.seats) if index not in kept]
            going += [seat.handle for seat in given_up if seat.handle is not None]
            fleet.seats = tuple(
                replace(seat, handle=None) if seat in given_up else seat for seat in fleet.seats
            )
        for way in self._of_other_models(decision):
            log.info("copy_gives_way", host=way.copy.member.name, layers=str(way.copy.config.layers))
            way.fleet.release(way.copy)
            if way.copy.is_loaded:
                going.append(way.copy)
            else:
                way.copy.kill()
        await asyncio.gather(*(handle.stop() for handle in going))

    def _of_other_models(self, decision: Replan) -> list[InTheWay]:
        hosts = {new.placement.host for new in decision.stages if _is_fresh(new)}
        return [
            way
            for member in self._members
            if member.name in hosts
            for way in self._account.in_the_way(member)
        ]


def _is_fresh(new: NewStage) -> bool:
    return new.kept is None and not new.is_copy


def _present(members: Mapping[str, Member], new: NewStage) -> Member:
    member = members.get(new.placement.host)
    if member is None:
        raise ClusterError(
            f"host {new.placement.host}, which was to hold layers {new.placement.layers}, left"
        )
    return member


class Switch:
    """Swaps rings.

    Args:
        fleet: Its seats become the new ring.
        coordinator: Sessions replay in it.
        term: Of the head.
        on_plan: Called with what is where now, and why.
    """

    def __init__(
        self,
        fleet: Fleet,
        coordinator: Coordinator,
        term: int,
        on_plan: Callable[[Sequence[StagePlacement], str], None],
    ) -> None:
        self._fleet = fleet
        self._coordinator = coordinator
        self._term = term
        self._on_plan = on_plan
        self._ending: set[asyncio.Task[None]] = set()

    async def to(
        self, seats: tuple[Seat, ...], reason: str, blame: Callable[[StageHandle, MeshError], None]
    ) -> None:
        """Go over to another ring, all of whose stages are loaded.

        Args:
            seats: The new ring. The fleet's from now on, even if this fails half-way.
            reason: For the log and the status.
            blame: See `wire_up`.

        Raises:
            MeshError: If a stage is gone or out of reach; sessions stay suspended.
        """
        before = self._fleet.handles
        self._fleet.seats, self._fleet.intended = seats, ()
        after = self._fleet.handles
        self._coordinator.pause(reason)
        try:
            keys = new_mesh_keys(self._term)
            addresses = await wire_up(seats, keys, blame)
            self._fleet.keys = keys
            await self._coordinator.reconnect(addresses, keys.mesh_id, keys.mesh_key)
        finally:
            for handle in before:
                if handle not in after:
                    self._end(handle)
        self._on_plan(self._fleet.placements, reason)

    def _end(self, handle: StageHandle) -> None:
        """Nobody waits for a stage that has nothing to do any more."""
        task = asyncio.create_task(handle.stop())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Wait for what is still ending."""
        await asyncio.gather(*self._ending)


@dataclass(frozen=True)
class _Situation:
    """What a decision is made of.

    Attributes:
        seats: The ring.
        lost: Indices of what is to be placed.
        hosts: Where something may be placed.
        copies: What hosts have loaded ahead.
    """

    seats: tuple[Seat, ...]
    lost: frozenset[int]
    hosts: tuple[HostCapacity, ...]
    copies: tuple[Copy, ...]

    def is_as_good(self, now: _Situation, decision: Replan) -> bool:
        """Whether a decision made of this is as good for what there is now."""
        fresh = [new.placement for new in decision.stages if new.kept is None]
        used = [Copy(new.placement.host, new.placement.layers) for new in decision.stages if new.is_copy]
        return (
            (now.seats, now.lost) == (self.seats, self.lost)
            and set(now.copies).issuperset((*used, *decision.dropped))
            and is_room_as_before(self.hosts, now.hosts, (stage.host for stage in fresh))
        )


@dataclass(frozen=True)
class Crew:
    """What it takes to make one ring out of another.

    Attributes:
        fleet: Stages and copies.
        members: Hosts.
        sizes: Of the model's stages.
        capacity_of: What a host gives, as the planner sees it.
        is_there: Whether a host answers within some seconds.
        placer: Loads stages.
        switch: Swaps rings.
        coordinator: Whose ring it is.
        incidents: Notes what happened.
        on_failure: Called with each lost stage, so that its last words can be read.
        say: Tells everybody what is going on.
        clock_s: Monotonic, seconds.
        replan: Decides where lost stages go, as `mesh.placement.replanner.replan` does.
    """

    fleet: Fleet
    members: Members
    sizes: StageSizes
    capacity_of: Callable[[Member], HostCapacity]
    is_there: Callable[[Member, float], Awaitable[bool]]
    placer: Placer
    switch: Switch
    coordinator: Coordinator
    incidents: Incidents
    on_failure: Callable[[Failure, StageLoss, Member], None]
    say: Callable[[str], None]
    clock_s: Callable[[], float]
    replan: Callable[..., Replan] = replan

    @property
    def nodes_ready(self) -> frozenset[str]:
        """Ray nodes of the hosts on which a stage can be placed."""
        return frozenset(member.ray_node_name for member in self.members.ready)

    async def decide(
        self,
        lost: Callable[[], Collection[int]],
        hosts: Callable[[], Iterable[Member]],
        *,
        may_start_over: bool = True,
    ) -> Replan:
        """Where lost stages go; no other model counts on that room from now on. See `replan`.

        Args:
            lost: Indices of what is to be placed, as it is when asked.
            hosts: Where something may be placed, likewise.
            may_start_over: Whether surviving stages may be given up.

        Raises:
            ModelDoesNotFit: With what is needed and what each host has left.
            NotEnoughHosts: If there is no host for what is lost.
        """
        fleet = self.fleet
        fleet.intended = ()

        def look() -> _Situation:
            capacities = tuple(self.capacity_of(member) for member in hosts())
            return _Situation(fleet.seats, frozenset(lost()), capacities, fleet.copy_list())

        def make(situation: _Situation, is_time_up: Callable[[], bool]) -> Replan:
            return self.replan(
                self.sizes,
                tuple(seat.placement for seat in situation.seats),
                situation.lost,
                situation.hosts,
                situation.copies,
                may_start_over=may_start_over,
                is_time_up=is_time_up,
            )

        decision = await agreed(look, make, _Situation.is_as_good)
        fleet.intend(decision)
        return decision

    def wires(self, decision: Replan) -> tuple[HiddenType, ...]:
        """How hidden states travel in a ring to be: as they did behind the same layers."""
        return tuple(self.fleet.wire_behind(new.placement.layers) for new in decision.stages)


def make_crew(
    known: Preflight,
    head: Head,
    fleet: Fleet,
    placer: Placer,
    coordinator: Coordinator,
    *,
    term: int,
    capacity_of: Callable[[Member], HostCapacity],
    incidents: Incidents,
    on_failure: Callable[[Failure, StageLoss, Member], None],
    on_plan: Callable[[Sequence[StagePlacement], str], None],
    say: Callable[[str], None],
    topology: Topology | None = None,
) -> Crew:
    """A crew for a head that serves; see `Crew` and `Switch` for the arguments."""

    async def is_there(member: Member, timeout_s: float) -> bool:
        if member.ray_node_name == head.own.ray_node_name:
            return True
        return await head.service.answers(member.name, timeout_s)

    return Crew(
        fleet=fleet,
        members=head.members,
        sizes=StageSizes(known.model, known.workload),
        capacity_of=capacity_of,
        is_there=is_there,
        placer=placer,
        switch=Switch(fleet, coordinator, term, on_plan),
        coordinator=coordinator,
        incidents=incidents,
        on_failure=on_failure,
        say=say,
        clock_s=time.monotonic,
        replan=replan if topology is None else topology.replan,
    )
