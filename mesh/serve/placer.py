"""Carries out a decision of `mesh.replanner`: what is new is loaded, what is not wanted any more ends."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import structlog

from mesh.interruption import first_of
from mesh.progress import progress_bars
from mesh.replanner import Copy
from mesh.serve.fleet import Seat
from spanmesh_proto.errors import ClusterError, MeshError, StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    from mesh.cluster.members import Member, Members
    from mesh.coordinator import StageAddress
    from mesh.replanner import NewStage, Replan
    from mesh.serve.fleet import Fleet
    from mesh.serve.mesh_keys import MeshKeys
    from mesh.serve.stage_handle import StageHandle
    from mesh.serve.stage_maker import StageMaker
    from stages.hidden_codec import HiddenType

    Blame = Callable[[StageHandle, MeshError], None]

log = structlog.get_logger()


class Placer:
    """Fills the seats of a ring.

    Args:
        maker: Makes stages.
        fleet: What there is.
        members: Hosts.
    """

    def __init__(self, maker: StageMaker, fleet: Fleet, members: Members) -> None:
        self._maker = maker
        self._fleet = fleet
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
        await self._make_room(decision)
        await self._maker.cut([new.placement.layers for new in decision.stages if _is_fresh(new)])
        fresh = self._fresh(decision, wires)
        try:
            await first_of(load_all(tuple(fresh.values()), blame), self._watch(tuple(fresh.values())))
        except BaseException:
            for handle in fresh.values():
                if handle.is_loaded:
                    fleet.copies.append(handle)
                else:
                    handle.kill()
            raise
        return tuple(
            Seat(new.placement, wire, fresh.get(index) or self._old(new))
            for index, (new, wire) in enumerate(zip(decision.stages, wires, strict=True))
        )

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
        loading_bytes = Counter[str]()
        for new in decision.stages:
            host = new.placement.host
            if new.kept is not None:
                handle = self._fleet.seats[new.kept].handle
                staying[host] += 0 if handle is None else handle.config.options.num_threads
            elif _is_fresh(new):
                sharing[host] += 1
                loading_bytes[host] += new.placement.memory.loading_bytes
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
                num_threads=max(1, (member.facts.num_threads - staying[host]) // sharing[host]),
                beside_bytes=loading_bytes[host] - new.placement.memory.loading_bytes,
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
        await asyncio.gather(*(handle.stop() for handle in going))


async def load_all(handles: Sequence[StageHandle], blame: Blame) -> None:
    """Place and load stages, all at once, with progress.

    Args:
        handles: The stages.
        blame: Called with each that failed, and why.

    Raises:
        ModelDoesNotFit: If a host has too little memory left; nothing is loaded then.
        MeshError: What the first stage that failed says.
    """
    await _all(_blaming(handle.place(), handle, blame) for handle in handles)
    await _all(_blaming(handle.check_memory(), handle, blame) for handle in handles)
    with progress_bars() as bars:
        await _all(
            _blaming(handle.load(bars.add(f"{handle.who}: waiting")), handle, blame) for handle in handles
        )


async def wire_up(seats: Sequence[Seat], keys: MeshKeys, blame: Blame) -> tuple[StageAddress, ...]:
    """Make loaded stages one ring, each linked to the next.

    Args:
        seats: In pipeline order.
        keys: Of the new ring.
        blame: Called with each stage that did not answer, or that the one before it could not reach; and why.

    Returns:
        Where they serve, in pipeline order.

    Raises:
        MeshError: If a stage does not answer, or cannot reach the next.
    """
    handles = [seat.handle for seat in seats if seat.handle is not None]
    if len(handles) < len(seats):
        raise StageFailed("a stage of the ring was lost before it was wired")
    await _all(
        _blaming(_enter(handle, index, keys, seat.wire), handle, blame)
        for index, (handle, seat) in enumerate(zip(handles, seats, strict=True))
    )
    await _all(
        _blaming(handle.connect(following), following, blame)
        for handle, following in itertools.pairwise(handles)
    )
    return tuple(handle.address for handle in handles)


def note_trouble(handle: StageHandle, error: MeshError) -> None:
    """Log which stage failed; for whoever draws no conclusions from it."""
    layers = str(handle.config.layers)
    log.warning("stage_in_trouble", host=handle.member.name, layers=layers, reason=error.message)


async def _enter(handle: StageHandle, index: int, keys: MeshKeys, wire: HiddenType) -> None:
    await handle.serve()
    await handle.rejoin(index, keys, wire)


async def _blaming(work: Coroutine[Any, Any, None], handle: StageHandle, blame: Blame) -> None:
    try:
        await work
    except MeshError as error:
        blame(handle, error)
        raise


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first failure ends the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_fresh(new: NewStage) -> bool:
    return new.kept is None and not new.is_copy


def _present(members: Mapping[str, Member], new: NewStage) -> Member:
    member = members.get(new.placement.host)
    if member is None:
        raise ClusterError(
            f"host {new.placement.host}, which was to hold layers {new.placement.layers}, left"
        )
    return member
