"""Carries out a decision of `replanner`: what is new is loaded, what is not wanted any more ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import structlog

from mesh.placement.replanner import Copy
from mesh.serve.fleet import Seat
from mesh.serve.loading import load_all
from mesh.util.tasks import first_of
from spanmesh_proto.errors import ClusterError, StageFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.cluster.members import Member, Members
    from mesh.placement.replanner import NewStage, Replan
    from mesh.serve.blame import Blame
    from mesh.serve.ledger import Account, InTheWay
    from mesh.serve.stage_handle import StageHandle
    from mesh.serve.stage_maker import StageMaker
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
