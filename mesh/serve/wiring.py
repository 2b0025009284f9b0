"""Loaded stages become one ring."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

from mesh.serve.blame import all_at_once, blaming
from spanmesh_proto.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.coordinator.ring import StageAddress
    from mesh.serve.blame import Blame
    from mesh.serve.fleet import Seat
    from mesh.serve.mesh_keys import MeshKeys
    from mesh.serve.stage_handle import StageHandle
    from stages.transport.hidden_codec import HiddenType


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
    await all_at_once(
        blaming(partial(_enter, handle, index, keys, seat.wire), handle, blame)
        for index, (handle, seat) in enumerate(zip(handles, seats, strict=True))
    )
    await all_at_once(
        blaming(partial(handle.connect, following), following, blame)
        for handle, following in itertools.pairwise(handles)
    )
    return tuple(handle.address for handle in handles)


async def _enter(handle: StageHandle, index: int, keys: MeshKeys, wire: HiddenType) -> None:
    await handle.serve()
    await handle.rejoin(index, keys, wire)
