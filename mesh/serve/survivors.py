"""Who is left when a ring has broken: every stage and every host is asked, all at the same time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from mesh.cluster.members import Member
    from mesh.coordinator.ring import RingLoss
    from mesh.serve.fleet import Fleet
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
