"""Work for as long as somebody waits for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.types import Receive

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def unless_hung_up(
    work: Coroutine[None, None, Result], receive: Receive, closing: asyncio.Event
) -> Result:
    """Run `work`; cancel it, and wait until it has cleaned up, once nobody wants its result any more.

    Args:
        work: What to do.
        receive: The request's ASGI channel, its body already read.
        closing: Set when the server shuts down.

    Raises:
        ClientGoneError: If the client hung up.
        ClusterError: If the server shuts down.
    """
    worker = asyncio.create_task(work)
    hang_up = asyncio.create_task(_hang_up(receive))
    shutdown = asyncio.create_task(closing.wait())
    tasks = (worker, hang_up, shutdown)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finished = worker.done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if finished:
        return worker.result()
    if closing.is_set():
        raise ClusterError("the server is shutting down: try again in a moment", retry_after_s=5)
    raise ClientGoneError


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
