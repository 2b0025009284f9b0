"""Clients that disconnect: work for them ends, and they get no answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import structlog
from starlette.responses import Response

from mesh.api.backend import backend_of
from mesh.api.middleware import CLIENT_GONE_STATUS
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.requests import Request
    from starlette.types import Receive

log = structlog.get_logger()

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client disconnected before its answer was complete."""


async def on_client_gone(_request: Request, _error: Exception) -> Response:
    """Exception handler of the app: the log has a status, though no client reads it."""
    log.info("client_gone")
    return Response(status_code=CLIENT_GONE_STATUS)


async def while_connected(request: Request, work: Coroutine[None, None, Result]) -> Result:
    """Result of work for a request, whose body has been read; see `cancel_on_disconnect`.

    Raises:
        ClientGoneError: If the client disconnected.
        MeshError: What the work raises, or that the server shuts down.
    """
    return await cancel_on_disconnect(work, request.receive, backend_of(request).api.closing)


async def cancel_on_disconnect(
    work: Coroutine[None, None, Result], receive: Receive, closing: asyncio.Event
) -> Result:
    """Run `work`; cancel it, and wait for its cleanup, when the client or the server is gone.

    Args:
        work: The work.
        receive: ASGI channel of the request, its body already read.
        closing: Set when the server shuts down.

    Raises:
        ClientGoneError: If the client disconnected.
        ClusterError: If the server shuts down.
    """
    worker = asyncio.create_task(work)
    hang_up = asyncio.create_task(_disconnected(receive))
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
