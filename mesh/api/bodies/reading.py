"""Reading of request bodies: admitted by the budget, parsed here or, if large, by another process."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgpack
from starlette.requests import ClientDisconnect

from mesh.api.auth import client_of
from mesh.api.bodies.budget import MOST_BODY_BYTES, hold_of
from mesh.api.bodies.encoding import decode
from mesh.api.bodies.worker import REFUSED, job_header
from mesh.api.request_parsing import NAMES, is_simple, max_values, parse_body
from mesh.text.text_service import NUM_BODY_WORKERS
from mesh.util.tasks import first_of
from mesh.util.worker_pool import WorkerEnded, WorkerPool
from spanmesh_proto.errors import InvalidRequest, Overloaded, RequestTooLarge

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Message

    from mesh.api.bodies.budget import BodyHold
    from mesh.api.request_parsing import Body, UnknownFields

_LEAST_BYTES: Final = 1024 * 1024
_BYTES_PER_POSITION: Final = 256
# While others wait for the bytes that a body holds, it must arrive at this rate, after a start.
_LEAST_BYTES_PER_S: Final = 256 * 1024
_START_S: Final = 10.0
_LOOK_AGAIN_S: Final = 1.0
_RETRY_AFTER_S: Final = 5

# The largest bodies take about a second.
_CPU_LIMIT_S: Final = 10.0
_WALL_LIMIT_S: Final = 60.0
_MEMORY_BYTES: Final = 1024 * 2**20


def max_body_bytes(context_length: int) -> int:
    """Most bytes of a body: ample for a full context, few enough to hold several."""
    return min(_LEAST_BYTES + _BYTES_PER_POSITION * context_length, MOST_BODY_BYTES)


@cache
def shared_body_pool() -> WorkerPool:
    """The processes that parse bodies for all servers of this process; they end with it."""
    return WorkerPool(
        "mesh.api.bodies.worker",
        num_workers=NUM_BODY_WORKERS,
        cpu_limit_s=_CPU_LIMIT_S,
        wall_limit_s=_WALL_LIMIT_S,
        memory_bytes=_MEMORY_BYTES,
    )


@cache
def _decoding_thread() -> ThreadPoolExecutor:
    # One is enough: reading takes a fraction of the time that parsing does.
    return ThreadPoolExecutor(1, thread_name_prefix="body-decoder")


async def read_body(
    request: Request, kind: type[Body], unknown: UnknownFields, *, context_length: int
) -> Body:
    """Read, parse and check a JSON body.

    The content type must be JSON's: a web page cannot send that to another origin without a preflight, so no
    page can make a visitor's browser use a server on the visitor's own machine.

    Args:
        request: Request with the body.
        kind: Model of the body.
        unknown: Records unknown fields.
        context_length: Positions of a session; longer ones permit larger bodies.

    Raises:
        RequestTooLarge: As soon as it is known, before the rest is received.
        InvalidRequest: Naming the field at fault, if it is one.
        Overloaded: If bodies of others take all room for too long, or this one arrives too slowly meanwhile.
        ClientDisconnect: If the client is gone.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequest("send the body as JSON, with the header `Content-Type: application/json`")
    data = await _read(request, max_body_bytes(context_length))
    most_values = max_values(context_length)
    if is_simple(data):
        body = parse_body(data, kind, most_values)
    else:
        body = await _parsed_elsewhere(request, data, kind, most_values)
    unknown.note(name for name in body.model_extra or () if name not in NAMES)
    return body


async def _read(request: Request, most_bytes: int) -> bytes:
    told = request.headers.get("content-length", "")
    told_bytes = int(told) if told.isdecimal() else None
    if told_bytes is not None and told_bytes > most_bytes:
        raise _too_large(most_bytes)
    hold = hold_of(request.scope)
    await hold.take(most_bytes if told_bytes is None else told_bytes)
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    parts: list[bytes] = []
    num_bytes = 0
    is_complete = False
    while not is_complete:
        due_s = begun_s + _START_S + num_bytes / _LEAST_BYTES_PER_S
        message = await _next_part(request, hold, due_s)
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > most_bytes:
            raise _too_large(most_bytes)
        is_complete = not message.get("more_body", False)
    hold.keep(num_bytes)
    return b"".join(parts)


async def _next_part(request: Request, hold: BodyHold, due_s: float) -> Message:
    """The next part of the body; others that wait for its bytes end a request that is late."""
    loop = asyncio.get_running_loop()
    while True:
        if loop.time() >= due_s and hold.is_wanted:
            raise Overloaded(
                f"the body arrives at less than {_LEAST_BYTES_PER_S // 1024} KiB a second, and other requests"
                f" wait for the memory that it takes: try again in {_RETRY_AFTER_S} s",
                retry_after_s=_RETRY_AFTER_S,
            )
        try:
            async with asyncio.timeout_at(max(due_s, loop.time() + _LOOK_AGAIN_S)):
                return await request.receive()
        except TimeoutError:
            continue


def _too_large(most_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {most_bytes} bytes, which is more than a context holds")


async def _parsed_elsewhere(request: Request, data: bytes, kind: type[Body], most_values: int) -> Body:
    """`parse_body` in another process, since it would hold the interpreter's lock; ended with the client."""
    answer = b""

    async def parse() -> None:
        nonlocal answer
        header = job_header(kind, most_values)
        answer = await shared_body_pool().run(header, data, client=client_of(request.scope))

    try:
        await first_of(parse(), _hang_up(request))
    except WorkerEnded as ended:
        raise InvalidRequest(f"the body {ended.reason}: send less") from None
    if answer[:1] == REFUSED:
        message, param = msgpack.unpackb(answer[1:], unicode_errors="surrogatepass")
        raise InvalidRequest(message, param=param)
    loop = asyncio.get_running_loop()
    body: Any = await loop.run_in_executor(_decoding_thread(), _decoded, memoryview(answer)[1:])
    if not isinstance(body, kind):
        raise TypeError(f"{kind.__name__} was parsed as {type(body).__name__}")
    return body


def _decoded(data: memoryview) -> Any:
    # The collector would look for cycles again and again while objects are made, with the interpreter's lock
    # held and more of them each time. A body has none.
    gc.disable()
    try:
        return decode(data)
    finally:
        gc.enable()


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
