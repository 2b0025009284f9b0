"""Request bodies on their way in: bytes within a budget, parsed here or, if large, by another process."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgpack
from starlette.requests import ClientDisconnect

from mesh.api.auth import client_of
from mesh.api.body_worker import REFUSED, decode, job_header
from mesh.api.request_parsing import is_simple, max_values, parse_body, unknown_names
from mesh.text.text_service import NUM_BODY_WORKERS
from mesh.util.fair_queue import FairQueue
from mesh.util.tasks import first_of
from mesh.util.worker_main import return_free_memory
from mesh.util.worker_pool import WorkerEnded, WorkerPool, ahead_s
from spanmesh_proto.errors import InvalidRequest, Overloaded, RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from mesh.api.request_parsing import Body, UnknownFields

# Of the largest context.
MOST_BODY_BYTES: Final = 16 * 2**20
# Base64 of all the pictures of a conversation, and ample text.
MOST_PICTURE_BODY_BYTES: Final = 28 * 2**20
_CLIENT_BODIES: Final = 2
_TOTAL_BODIES: Final = 8
# With pictures. Few chats with text come near the largest body; one with pictures soon does, and is held
# until its answer ends, while the chats of one user run side by side.
_MORE_WITH_PICTURES: Final = 2
_MAX_WAITING: Final = 256
# Such a body is freed at once, not when the collector looks for garbage the next time.
_LARGE_BYTES: Final = 2**20
# From the end of large bodies until their memory is returned to the system.
_RETURN_S: Final = 1.0
# Less than the time within which a request must arrive.
_MAX_WAIT_S: Final = 30.0
_HOLD: Final = "spanmesh.body_hold"
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


class BodyBudget:
    """Bytes of bodies that requests hold; further requests wait, and clients take turns (`FairQueue`).

    A body is admitted while its client has room for one of the largest, and the server likewise, so that none
    waits for ever behind smaller ones.

    Args:
        body_bytes: Returns the most bytes of one body, which models may change that are loaded later.
        client_bodies: The largest bodies that one client may have at once; twice as many with pictures.
        total_bodies: Likewise all clients, and requests without a client.
        max_wait_s: Longest wait, seconds.
    """

    def __init__(
        self,
        *,
        body_bytes: Callable[[], int] = lambda: MOST_BODY_BYTES,
        client_bodies: int = _CLIENT_BODIES,
        total_bodies: int = _TOTAL_BODIES,
        max_wait_s: float = _MAX_WAIT_S,
    ) -> None:
        self._body_bytes = body_bytes
        self._client_bodies = client_bodies
        self._total_bodies = total_bodies
        self._max_wait_s = max_wait_s
        self._held: Counter[str | None] = Counter()
        self._queue: FairQueue[str | None, asyncio.Future[None]] = FairQueue(_MAX_WAITING)
        self._wanted: dict[asyncio.Future[None], tuple[str | None, int]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return self._held.total()

    @property
    def is_wanted(self) -> bool:
        """Whether a request waits for bytes that others hold."""
        return len(self._queue) > 0

    async def take(self, client: str | None, num_bytes: int) -> None:
        """Wait for room, and take it.

        Args:
            client: Client of the request.
            num_bytes: Size of its body.

        Raises:
            Overloaded: If too many requests wait, or there is no room for too long.
        """
        if not self.is_wanted and self._may_begin(client):
            self._held[client] += num_bytes
            return
        if not self._queue.has_room(client):
            raise self._overloaded(client)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.add(client, turn)
        self._wanted[turn] = (client, num_bytes)
        # Others may wait for what this one needs not.
        self._admit()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turn
        except BaseException as error:
            self._queue.discard(client, turn)
            if self._wanted.pop(turn, None) is None:
                self.give_back(client, num_bytes)
            if isinstance(error, TimeoutError):
                raise self._overloaded(client) from None
            raise

    def give_back(self, client: str | None, num_bytes: int) -> None:
        """Return bytes, and admit those that wait for them."""
        self._held[client] -= num_bytes
        if not self._held[client]:
            del self._held[client]
        self._admit()

    def _may_begin(self, client: str | None) -> bool:
        others_bytes = (self._total_bodies - 1) * self._body_bytes()
        return self._held.total() <= others_bytes and self._has_share(client)

    def _has_share(self, client: str | None) -> bool:
        body_bytes = self._body_bytes()
        more = _MORE_WITH_PICTURES if body_bytes > MOST_BODY_BYTES else 1
        return client is None or self._held[client] <= (more * self._client_bodies - 1) * body_bytes

    def _admit(self) -> None:
        while (turn := self._queue.next(self._may_begin)) is not None:
            client, num_bytes = self._wanted.pop(turn)
            self._held[client] += num_bytes
            if turn.done():  # cancelled, and about to give the bytes back
                continue
            turn.set_result(None)

    def _overloaded(self, client: str | None) -> Overloaded:
        why = "bodies of other requests take all of the memory for bodies"
        if not self._has_share(client):
            why = (
                f"requests with this API key that are not answered yet hold {self._held[client]} bytes of "
                "bodies, as many as one key may"
            )
        return Overloaded(
            f"{why}, and {len(self._queue)} requests wait for room: try again in {_RETRY_AFTER_S} s",
            retry_after_s=_RETRY_AFTER_S,
        )


class BodyHold:
    """Bytes that one request holds.

    Args:
        budget: The server's.
        client: Client of the request.
    """

    def __init__(self, budget: BodyBudget, client: str | None) -> None:
        self._budget = budget
        self._client = client
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""
        return self._num_bytes

    @property
    def is_wanted(self) -> bool:
        """Whether another request waits for bytes."""
        return self._budget.is_wanted

    async def take(self, num_bytes: int) -> None:
        """Wait for room for the body.

        Raises:
            Overloaded: See `BodyBudget.take`.
        """
        await self._budget.take(self._client, num_bytes)
        self._num_bytes += num_bytes

    def keep(self, num_bytes: int) -> None:
        """Give back all but so many bytes."""
        spare = max(0, self._num_bytes - num_bytes)
        self._num_bytes -= spare
        if spare:
            self._budget.give_back(self._client, spare)


class BoundedBodies:
    """Middleware behind the key gate that frees what the body of a request took, however the request ends.

    Args:
        app: Next ASGI app.
        budget: Budget of all requests.
    """

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget
        self._is_return_due = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, then free."""
        scope[_HOLD] = hold = BodyHold(self._budget, client_of(scope))
        try:
            await self._app(scope, receive, send)
        finally:
            is_large = hold.num_bytes >= _LARGE_BYTES
            hold.keep(0)
            if is_large:
                loop = asyncio.get_running_loop()
                # The traceback of a refusal and its frames refer to each other, and to the body. Only young
                # objects are looked at, which are few.
                loop.call_soon(gc.collect, 1)
                if not self._is_return_due:
                    self._is_return_due = True
                    loop.call_later(_RETURN_S, self._return_memory)

    def _return_memory(self) -> None:
        loop = asyncio.get_running_loop()
        if self._budget.num_bytes >= _LARGE_BYTES:
            loop.call_later(_RETURN_S, self._return_memory)
            return
        self._is_return_due = False
        # Frames that were there before others ended are not young any more.
        gc.collect()
        loop.run_in_executor(None, return_free_memory)


def hold_of(scope: Scope) -> BodyHold:
    """The hold of a request that passed `BoundedBodies`."""
    hold: BodyHold = scope[_HOLD]
    return hold


def max_body_bytes(context_length: int, *, has_pictures: bool = False) -> int:
    """Most bytes of a body: ample for a full context, few enough to hold several.

    Args:
        context_length: Positions of a session.
        has_pictures: Whether the body may have pictures.
    """
    if has_pictures:
        return MOST_PICTURE_BODY_BYTES
    return min(_LEAST_BYTES + _BYTES_PER_POSITION * context_length, MOST_BODY_BYTES)


@cache
def shared_body_pool() -> WorkerPool:
    """The processes that parse bodies for all servers of this process; they end with it."""
    return WorkerPool(
        "mesh.api.body_worker",
        num_workers=NUM_BODY_WORKERS,
        cpu_limit_s=_CPU_LIMIT_S,
        wall_limit_s=_WALL_LIMIT_S,
        memory_bytes=_MEMORY_BYTES,
        is_long=True,
    )


@cache
def _decoding_thread() -> ThreadPoolExecutor:
    # One is enough: reading takes a fraction of the time that parsing does.
    return ThreadPoolExecutor(1, thread_name_prefix="body-decoder")


async def read_body(
    request: Request,
    kind: type[Body],
    unknown: UnknownFields,
    *,
    context_length: int,
    has_pictures: bool = False,
) -> Body:
    """Read, parse and check a JSON body.

    The content type must be JSON's: a web page cannot send that to another origin without a preflight, so no
    page can make a visitor's browser use a server on the visitor's own machine.

    Args:
        request: Request with the body.
        kind: Model of the body.
        unknown: Records unknown fields.
        context_length: Positions of a session; longer ones permit larger bodies.
        has_pictures: Whether the body may have pictures, which permit larger ones as well.

    Raises:
        RequestTooLarge: As soon as it is known, before the rest is received.
        InvalidRequest: Naming the field at fault, if it is one.
        Overloaded: If bodies of others take all room for too long, or this one arrives too slowly meanwhile.
        ClientDisconnect: If the client is gone.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequest("send the body as JSON, with the header `Content-Type: application/json`")
    data = await _read(request, max_body_bytes(context_length, has_pictures=has_pictures))
    most_values = max_values(context_length)
    if is_simple(data):
        body = parse_body(data, kind, most_values)
    else:
        body = await _parsed_elsewhere(request, data, kind, most_values)
    unknown.note(unknown_names(body))
    return body


async def _read(request: Request, most_bytes: int) -> bytearray:
    told = request.headers.get("content-length", "")
    told_bytes = int(told) if told.isdecimal() else None
    if told_bytes is not None and told_bytes > most_bytes:
        raise _too_large(most_bytes)
    hold = hold_of(request.scope)
    await hold.take(most_bytes if told_bytes is None else told_bytes)
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    # Parts that are joined at the end would be copied all at once, which holds up the event loop.
    data = bytearray()
    is_complete = False
    while not is_complete:
        due_s = begun_s + _START_S + len(data) / _LEAST_BYTES_PER_S
        message = await _next_part(request, hold, due_s)
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        data += message.get("body", b"")
        if len(data) > most_bytes:
            raise _too_large(most_bytes)
        is_complete = not message.get("more_body", False)
        if wait_s := ahead_s(len(data), loop.time() - begun_s):
            await asyncio.sleep(wait_s)
    hold.keep(len(data))
    return data


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
    holder = "the pictures of a conversation take" if most_bytes > MOST_BODY_BYTES else "a context holds"
    return RequestTooLarge(f"the body is larger than {most_bytes} bytes, which is more than {holder}")


async def _parsed_elsewhere(request: Request, data: bytearray, kind: type[Body], most_values: int) -> Body:
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
    body: Any = await loop.run_in_executor(_decoding_thread(), _decoded, memoryview(answer)[1:], data)
    if not isinstance(body, kind):
        raise TypeError(f"{kind.__name__} was parsed as {type(body).__name__}")
    return body


def _decoded(answer: memoryview, data: bytearray) -> Any:
    # The collector would look for cycles again and again while objects are made, with the interpreter's lock
    # held and more of them each time. A body has none.
    gc.disable()
    try:
        return decode(answer, data)
    finally:
        gc.enable()


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
