"""Server-sent events: a response that is written as the answer comes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog
from starlette.responses import Response

from mesh.api.errors import error_body, error_response
from mesh.api.hang_up import ClientGoneError, unless_hung_up
from mesh.api.json_response import json_bytes
from mesh.api.unexpected import log_unexpected
from spanmesh_proto.errors import MeshError, wire_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Receive, Scope, Send

log = structlog.get_logger()

PING: Final = b": ping\n\n"
DONE: Final = b"data: [DONE]\n\n"
# An engine that refuses a request does so at once. For this long nothing is sent, so that the refusal can
# still be an HTTP status instead of an event in a stream that began with 200.
GRACE_S: Final = 0.05
# While a lost stage is replaced the engine takes its time to refuse; but no client hears nothing for longer.
_LONGEST_GRACE_S: Final = 3.0


def _error_event(error: BaseException) -> bytes:
    return b"data: " + json_bytes(error_body(error)) + b"\n\n"


class EventStream(Response):
    """Runs a producer and sends what it emits; pings while it is silent; stops it when the client leaves.

    Args:
        produce: Emits whole events, then returns.
        closing: Set when the server shuts down.
        ping_interval_s: A stream that has been silent this long sends a comment.
        is_whole: Whether the engine answers, or refuses, at once.
        done: What ends a stream that went well.
        told_of: The events that end one that did not.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Callable[[bytes], Awaitable[None]]], Awaitable[None]],
        closing: asyncio.Event,
        ping_interval_s: float,
        *,
        is_whole: Callable[[], bool] = lambda: True,
        done: bytes = DONE,
        told_of: Callable[[BaseException], bytes] = _error_event,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce = produce
        self._closing = closing
        self._ping_interval_s = ping_interval_s
        self._is_whole = is_whole
        self._done = done
        self._told_of = told_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. A failure before its first byte becomes an ordinary error response."""
        sink = _Sink(send, self.raw_headers)
        try:
            await unless_hung_up(self._run(sink), receive, self._closing)
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
            await sink.write(self._told_of(error))
        else:
            if self._done:
                await sink.write(self._done)
        await sink.end()

    async def _run(self, sink: _Sink) -> None:
        pinger = asyncio.create_task(self._ping(sink))
        try:
            await self._produce(sink.write)
        finally:
            pinger.cancel()
            await asyncio.gather(pinger, return_exceptions=True)

    async def _ping(self, sink: _Sink) -> None:
        await asyncio.sleep(GRACE_S)
        while not (sink.started or self._is_whole() or sink.silent_s() > _LONGEST_GRACE_S):  # noqa: ASYNC110
            await asyncio.sleep(GRACE_S)
        if not sink.started:
            await sink.write(PING)
        while True:
            wait_s = self._ping_interval_s - sink.silent_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await sink.write(PING)


class _Sink:
    """The response's way out. Producer and pinger both write; each write goes out whole."""

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
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self._last_write_s = self._loop.time()

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
