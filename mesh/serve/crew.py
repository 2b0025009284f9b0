"""All that repairs and moves work with."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.placement.replanner import Copy, replan
from mesh.placement.stage_sizes import StageSizes
from mesh.serve.planning import agreed, is_room_as_before
from mesh.serve.switch import Switch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

    from mesh.cluster.members import Member, Members
    from mesh.coordinator.coordinator import Coordinator
    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.planner import StagePlacement
    from mesh.placement.replanner import Replan
    from mesh.placement.topology import Topology
    from mesh.serve.fleet import Fleet, Seat
    from mesh.serve.head import Head
    from mesh.serve.incidents import Failure, Incidents
    from mesh.serve.placer import Placer
    from mesh.serve.preflight import Preflight
    from mesh.serve.stage_handle import StageLoss
    from stages.transport.hidden_codec import HiddenType


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
