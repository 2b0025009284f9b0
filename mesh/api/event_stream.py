"""Work and event streams that end with their client: server-sent events as they come, pings in silence."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import structlog
from starlette.responses import Response

from mesh.api.backend import backend_of
from mesh.api.errors import error_response
from mesh.api.middleware import CLIENT_GONE_STATUS, log_unexpected
from spanmesh_proto.errors import ClusterError, MeshError, wire_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    Emit = Callable[[bytes], Awaitable[None]]

Result = TypeVar("Result")
# Text of a comment without anything to tell.
PING: Final = "ping"
# An engine refuses a request at once. For this long nothing is sent, so that the refusal can still be an HTTP
# status instead of an event in a stream that began with 200.
GRACE_S: Final = 0.05
# While a lost stage is replaced the engine may refuse later; but every client hears something within this
# time.
_LONGEST_GRACE_S: Final = 3.0
log = structlog.get_logger()


class ClientGoneError(Exception):
    """The client disconnected before its answer was complete."""


@dataclass(frozen=True)
class StreamForm:
    """Form of an API's streams: what is not the same in all of them, beside the events of answers."""

    media_type: str
    """Content type."""
    comment: Callable[[str], bytes]
    """Returns what a silent stream sends to stay alive, from a text for people; clients pass over it."""
    failed: Callable[[BaseException], bytes]
    """Returns the events that end a stream with an error. Thread-safe."""
    done: bytes = b""
    """End of a stream without error."""


class EventSource(Protocol):
    """What a stream sends."""

    @property
    def form(self) -> StreamForm:
        """Form of the stream."""

    async def produce(self, emit: Emit) -> None:
        """Emit whole events, then return."""

    def comment(self) -> bytes:
        """Comment of a silent stream, or other events in its place."""

    def is_whole(self) -> bool:
        """Whether the engine answers, or refuses, at once."""

    def failed(self, error: BaseException) -> bytes:
        """Events that end a stream with an error. Thread-safe."""


class EventStream(Response):
    """Sends the events of a source; comments while it is silent; stops it when the client leaves.

    Args:
        source: Source of the events.
        closing: Set when the server shuts down.
        ping_interval_s: A stream that has been silent for this long sends a comment.

    Attributes:
        source: Source of the events from now on.
    """

    def __init__(self, source: EventSource, closing: asyncio.Event, ping_interval_s: float) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.media_type = source.form.media_type
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.source = source
        self._closing = closing
        self._ping_interval_s = ping_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. A failure before its first byte becomes an ordinary error response."""
        sink = _Sink(send, self.raw_headers)
        try:
            await cancel_on_disconnect(self._run(sink), receive, self._closing)
        except ClientGoneError:
            log.info("client_gone")
            return
        except Exception as error:  # noqa: BLE001 - a stream must say that it failed, whatever did
            if isinstance(error, MeshError):
                log.info("stream_failed", code=wire_of(error).code)
            else:
                log_unexpected(error)
            if not sink.started:
                await error_response(error)(scope, receive, send)
                return
            # In a thread, since it may repeat all that the request said.
            await sink.write(await asyncio.to_thread(self.source.failed, error))
        else:
            if self.source.form.done:
                await sink.write(self.source.form.done)
        await sink.end()

    async def _run(self, sink: _Sink) -> None:
        pinger = asyncio.create_task(self._ping(sink))
        try:
            await self.source.produce(sink.write)
        finally:
            pinger.cancel()
            await asyncio.gather(pinger, return_exceptions=True)

    async def _ping(self, sink: _Sink) -> None:
        await asyncio.sleep(GRACE_S)
        while not (sink.started or self.source.is_whole() or sink.silent_s() > _LONGEST_GRACE_S):  # noqa: ASYNC110
            await asyncio.sleep(GRACE_S)
        if not sink.started:
            await sink.write_in_turn(self._comment)
        while True:
            wait_s = self._ping_interval_s - sink.silent_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await sink.write_in_turn(self._comment)

    def _comment(self) -> bytes:
        return self.source.comment()


class DelayedStream(EventStream):
    """Stream of an answer whose model is loaded first: pings until the answer's own source takes over.

    Args:
        make: Returns the answer's stream, an `EventStream`, once the model is loaded.
        form: Form of the stream.
        closing: Set when the server shuts down.
        ping_interval_s: A stream that has been silent for this long sends a comment.

    Attributes:
        form: Form of the stream.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[Response]],
        form: StreamForm,
        closing: asyncio.Event,
        ping_interval_s: float,
    ) -> None:
        self.form = form
        super().__init__(self, closing, ping_interval_s)
        self._make = make

    async def produce(self, emit: Emit) -> None:
        """Load the model, then emit what its answer does."""
        made = await self._make()
        assert isinstance(made, EventStream)  # noqa: S101 - the request asked for a stream
        self.source = made.source
        await self.source.produce(emit)

    def comment(self) -> bytes:
        """Ping without anything to tell."""
        return self.form.comment(PING)

    def is_whole(self) -> bool:
        """Loading may be refused late."""
        return False

    def failed(self, error: BaseException) -> bytes:
        """Events that end the stream with an error of loading."""
        return self.form.failed(error)


class _Sink:
    """Output of the response. Producer and pinger both write; each write is sent whole."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last_write_s = self._loop.time()
        self.started = False

    def silent_s(self) -> float:
        return self._loop.time() - self._last_write_s

    async def write(self, events: bytes) -> None:
        async with self._lock:
            await self._write(events)

    async def write_in_turn(self, make: Callable[[], bytes]) -> None:
        """Write what `make` returns once no write is under way: until then it may become untrue."""
        async with self._lock:
            await self._write(make())

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, events: bytes) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._last_write_s = self._loop.time()


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
