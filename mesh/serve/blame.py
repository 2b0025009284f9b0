"""Work on several stages at once, and who is to blame if it fails."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import structlog

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from mesh.serve.stage_handle import StageHandle

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
