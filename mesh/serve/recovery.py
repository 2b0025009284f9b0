"""Recovery of a broken ring, with the stages that survived."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from mesh.coordinator.ring import RingLoss
from spanmesh_proto.errors import MeshError, ModelDoesNotFit, NotEnoughHosts, StageFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from mesh.cluster.members import Member
    from mesh.placement.replanner import Replan
    from mesh.serve.pipeline import Fleet
    from mesh.serve.reconfiguration import Crew
    from mesh.serve.stage_handle import StageHandle, StageLoss


# Whoever has been asked for more than a second already is asked once more, by another way.
_SILENT_S: Final = 0.4
# A living process answers within milliseconds; on a busy machine it may take a few hundred.
_SUSPECT_S: Final = 0.7
# Of whom nobody thinks ill: better to wait than to load a stage again that lives.
_OTHERS_S: Final = 2.0


@dataclass(frozen=True)
class Survivors:
    """What was found out.

    Attributes:
        lost: Why, by the index in the ring, for each stage that is gone.
        dead_copies: Copies that are gone.
        hosts: Names of members that answered.
    """

    lost: Mapping[int, StageLoss]
    dead_copies: tuple[StageHandle, ...]
    hosts: frozenset[str]


async def find_survivors(
    fleet: Fleet,
    loss: RingLoss,
    members: Collection[Member],
    is_there: Callable[[Member, float], Awaitable[bool]],
) -> Survivors:
    """Ask them all; takes as long as the slowest that answers, or as the first time-out.

    Args:
        fleet: Stages and copies.
        loss: Which stages may be gone.
        members: Hosts.
        is_there: Whether a host answers within some seconds.
    """
    suspects, silent = _hosts(fleet, loss.suspects), _hosts(fleet, loss.silent)

    def patience_s(host: str, innocent_s: float) -> float:
        if host in silent:
            return _SILENT_S
        return _SUSPECT_S if host in suspects else innocent_s

    seats = {index: seat.handle for index, seat in enumerate(fleet.seats) if seat.handle is not None}
    losses, copies, hosts = await asyncio.gather(
        asyncio.gather(*(stage.loss(patience_s(stage.member.name, _OTHERS_S)) for stage in seats.values())),
        asyncio.gather(*(copy.loss(patience_s(copy.member.name, _SUSPECT_S)) for copy in fleet.copies)),
        asyncio.gather(*(is_there(member, patience_s(member.name, _OTHERS_S)) for member in members)),
    )
    return Survivors(
        lost={index: loss for index, loss in zip(seats, losses, strict=True) if loss is not None},
        dead_copies=tuple(copy for copy, loss in zip(fleet.copies, copies, strict=True) if loss is not None),
        hosts=frozenset(member.name for member, there in zip(members, hosts, strict=True) if there),
    )


def _hosts(fleet: Fleet, stages: Collection[int]) -> frozenset[str]:
    return frozenset(fleet.seats[index].placement.host for index in stages if index < len(fleet.seats))


log = structlog.get_logger()

# After a try that failed: whoever is going down is given a moment to be gone, each time a longer one.
_FIRST_PAUSE_S: Final = 0.3
_MOST_PAUSE_S: Final = 3.0
# A host that failed so often during a repair is left alone until the next one.
_MOST_STRIKES: Final = 2
# Without a change among the hosts it is looked this often whether something fits after all.
_LOOK_AGAIN_S: Final = 3.0
_RETRY_AFTER_S: Final = 10


class Repair:
    """Of one loss, in as many rounds as it takes: whatever fails meanwhile is looked at in the next.

    Args:
        crew: What it works with.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._strikes: Counter[str] = Counter()
        self._said = ""

    async def run(self, loss: RingLoss) -> None:
        """Return when the ring is whole.

        Args:
            loss: What is known.
        """
        crew = self._crew
        started_s = crew.clock_s()
        log.error("ring_broken", reason=loss.reason, suspects=loss.suspects)
        crew.say("repairing")
        suspected, pause_s = loss, _FIRST_PAUSE_S
        while True:
            hosts = crew.nodes_ready
            try:
                decision = await self._decide(suspected)
            except (ModelDoesNotFit, NotEnoughHosts) as error:
                await self._wait_for_hosts(error, hosts)
            else:
                try:
                    await self._carry_out(decision)
                    break
                except MeshError as error:
                    log.warning("repair_goes_on", reason=error.message)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            # By now nobody is above suspicion, nor under it.
            suspected = RingLoss(loss.reason, ())
        took_s = crew.clock_s() - started_s
        crew.incidents.repaired(took_s)
        log.info("repaired", seconds=round(took_s, 3), how=decision.reason)
        crew.say("serving")

    async def _decide(self, loss: RingLoss) -> Replan:
        crew = self._crew
        survivors = await find_survivors(crew.fleet, loss, tuple(crew.members), crew.is_there)
        for index, lost in survivors.lost.items():
            self._bury(index, lost)
        for copy in survivors.dead_copies:
            crew.fleet.drop_copy(copy)
        return await crew.decide(
            lambda: crew.fleet.lost,
            lambda: (
                member
                for member in crew.members.ready
                if member.name in survivors.hosts and self._strikes[member.name] < _MOST_STRIKES
            ),
        )

    def _bury(self, index: int, loss: StageLoss) -> None:
        crew, seat = self._crew, self._crew.fleet.seats[index]
        crew.fleet.lose(index)
        layers = str(seat.placement.layers)
        log.error("stage_gone", stage=index, host=seat.placement.host, layers=layers, reason=loss.reason)
        failure = crew.incidents.failed(seat.placement.host, layers, loss.reason)
        if seat.handle is not None:
            crew.on_failure(failure, loss, seat.handle.member)

    async def _carry_out(self, decision: Replan) -> None:
        crew = self._crew
        log.info("repair_planned", how=decision.reason)
        seats = await crew.placer.fill(decision, crew.wires(decision), self._blame)
        await crew.switch.to(seats, decision.reason, self._blame)

    def _blame(self, handle: StageHandle, error: MeshError) -> None:
        host = handle.member.name
        self._strikes[host] += 1
        log.warning("stage_in_trouble", host=host, layers=str(handle.config.layers), reason=error.message)
        if self._strikes[host] >= _MOST_STRIKES:
            for index, seat in enumerate(self._crew.fleet.seats):
                if seat.handle is handle:
                    self._crew.fleet.lose(index)

    async def _wait_for_hosts(self, error: MeshError, hosts: frozenset[str]) -> None:
        """Wait for others than those that were there before it was found that they do not suffice."""
        crew = self._crew
        if error.message != self._said:
            self._said = error.message
            log.error("mesh_cannot_serve", reason=error.message)
            crew.say(f"waiting for hosts: {error.message}")
            crew.coordinator.give_up(StageFailed(error.message, retry_after_s=_RETRY_AFTER_S))
        self._strikes.clear()
        if crew.nodes_ready == hosts:
            await crew.members.change_within(_LOOK_AGAIN_S)
