"""Group operations on stages: loading, wiring, and the attribution of failures."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from mesh.util.progress import progress_bars
from spanmesh_proto.errors import MeshError, StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from mesh.coordinator.ring import StageAddress
    from mesh.serve.pipeline import Seat
    from mesh.serve.stage_handle import MeshKeys, StageHandle
    from stages.transport.hidden_codec import HiddenType

    Blame = Callable[[StageHandle, MeshError], None]


log = structlog.get_logger()


def note_trouble(handle: StageHandle, error: MeshError) -> None:
    """Log which stage failed; for whoever draws no conclusions from it."""
    layers = str(handle.config.layers)
    log.warning("stage_in_trouble", host=handle.member.name, layers=layers, reason=error.message)


async def blaming(work: Callable[[], Coroutine[Any, Any, None]], handle: StageHandle, blame: Blame) -> None:
    """Do work for a stage; if it fails, say whose it was.

    Args:
        work: Makes what is awaited. A coroutine made before would never be awaited if this is cancelled
            before it begins, of which Python warns on the terminal.
        handle: The stage.
        blame: Called with it and the error.
    """
    try:
        await work()
    except MeshError as error:
        blame(handle, error)
        raise


async def all_at_once(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first failure ends the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def load_all(handles: Sequence[StageHandle], blame: Blame) -> None:
    """Place and load stages, all at once, with progress.

    Args:
        handles: The stages.
        blame: Called with each that failed, and why.

    Raises:
        ModelDoesNotFit: If a host has too little memory left; nothing is loaded then.
        MeshError: What the first stage that failed says.
    """
    await all_at_once(blaming(handle.place, handle, blame) for handle in handles)
    await all_at_once(blaming(handle.check_memory, handle, blame) for handle in handles)
    with progress_bars() as bars:
        await all_at_once(
            blaming(partial(handle.load, bars.add(f"{handle.who}: waiting")), handle, blame)
            for handle in handles
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
