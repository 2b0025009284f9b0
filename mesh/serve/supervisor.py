"""Supervisor of a pipeline: repairs, moves and replicas."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NoReturn

import structlog

from mesh.coordinator.ring import RingLoss
from mesh.serve.recovery import Repair
from mesh.serve.stage_group import note_trouble
from spanmesh_proto.errors import MeshError, ModelDoesNotFit, NotEnoughHosts

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from mesh.placement.replanner import Replan
    from mesh.serve.host_draining import Departures
    from mesh.serve.pipeline import Seat
    from mesh.serve.reconfiguration import Crew
    from mesh.serve.replicas import Spares

log = structlog.get_logger()

# Hosts are looked at when one changes, and at the latest after this long.
_LOOK_S: Final = 1.0


class Tending:
    """The one task that changes the fleet.

    Args:
        crew: What repairs and moves work with.
        spares: Loads copies while there is nothing else to do.
        departures: Who is to leave.
    """

    def __init__(self, crew: Crew, spares: Spares, departures: Departures) -> None:
        self._crew = crew
        self._spares = spares
        self._departures = departures

    async def run(self) -> NoReturn:
        """Go on for ever; what fails is tried again."""
        while True:
            loss = await self._until_broken(self._until_something_to_do())
            if loss is None and not self._crew.fleet.lost:
                loss = await self._move()
            if loss is not None or self._crew.fleet.lost:
                await Repair(self._crew).run(loss or RingLoss("a host was evicted", ()))

    async def _until_something_to_do(self) -> None:
        """Return when a stage is to be moved, or is gone; meanwhile there is time for copies."""
        spares = asyncio.create_task(self._spares.run())
        try:
            while not (self._crew.fleet.lost or self._to_move()):
                for member in self._departures.leaving:
                    self._departures.let_go_if_free(member)
                if spares.done():
                    spares.result()
                await self._crew.members.change_within(_LOOK_S)
        finally:
            spares.cancel()
            await asyncio.gather(spares, return_exceptions=True)

    def _to_move(self) -> frozenset[int]:
        """Indices of stages whose host is leaving, or has left though they still live."""
        staying = [member for member in self._crew.members if not member.is_leaving]
        return frozenset(
            index
            for index, seat in enumerate(self._crew.fleet.seats)
            if not any(seat.is_on(member) for member in staying)
        )

    async def _move(self) -> RingLoss | None:
        """Make before break: load what is to be moved elsewhere while the ring goes on, then swap rings.

        Returns:
            What broke instead, if anything did.
        """
        crew, to_move = self._crew, self._to_move()
        if not to_move:
            return None
        decided: list[Replan] = []

        async def decide() -> None:
            decided.append(await crew.decide(self._to_move, lambda: crew.members.ready, may_start_over=False))

        try:
            loss = await self._until_broken(decide())
        except (ModelDoesNotFit, NotEnoughHosts) as error:
            return await self._until_broken(self._nobody_else(to_move, error))
        if loss is not None:
            crew.fleet.intended = ()
            return loss
        decision = decided[0]
        log.info("moving", how=decision.reason)
        crew.say(f"moving {decision.reason}")
        seats: list[Seat] = []

        async def fill() -> None:
            seats.extend(await crew.placer.fill(decision, crew.wires(decision), note_trouble))

        try:
            loss = await self._until_broken(fill())
            if loss is not None:
                self._keep_as_copies(seats)
                return loss
            await crew.switch.to(tuple(seats), decision.reason, note_trouble)
        except MeshError as error:
            log.warning("move_failed", reason=error.message)
            return RingLoss(error.message, ()) if seats else None
        crew.incidents.moved()
        crew.say("serving")
        return None

    def _keep_as_copies(self, seats: Iterable[Seat]) -> None:
        """What was loaded for a ring that did not come to be helps the repair."""
        fleet = self._crew.fleet
        fleet.intended = ()
        for seat in seats:
            if seat.handle is not None and seat.handle not in fleet.handles:
                fleet.copies.append(seat.handle)

    async def _nobody_else(self, to_move: frozenset[int], error: MeshError) -> None:
        fleet = self._crew.fleet
        for name in {fleet.seats[index].placement.host for index in to_move}:
            self._departures.stuck(name, error.message)
        await self._crew.members.change_within(_LOOK_S)

    async def _until_broken(self, work: Coroutine[Any, Any, None]) -> RingLoss | None:
        """Work until it is done, or until the ring breaks; returns what broke.

        Raises:
            MeshError: What the work raises.
        """
        working = asyncio.create_task(work)
        watching = asyncio.create_task(self._crew.coordinator.broken())
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
