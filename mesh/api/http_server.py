"""HTTP server on uvicorn, with limits and timeouts of connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mesh.api.auth import OPEN_PATHS, require_key_beyond_loopback
from mesh.api.errors import error_body, error_response, json_bytes
from mesh.api.middleware import LocalHosts
from spanmesh_proto.addresses import is_loopback, join_address
from spanmesh_proto.errors import ClusterError, InvalidRequest, MeshError, PortInUse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

PATIENCE_S: Final = 60.0
# A request may take that much longer for each of its bytes: a quarter of an hour for the largest.
_LEAST_BYTES_PER_S: Final = 16 * 1024
# The rate of one token a second; a slower reader would keep a slot busy for little.
_LEAST_READ_BYTES_PER_S: Final = 256
# A client that has sent all but so much of a refused body keeps its connection.
_MOST_DISCARDED_BYTES: Final = 256 * 1024
_LINGER_S: Final = 1.0
_MOST_CONNECTIONS: Final = 1024
_RETRY_AFTER_S: Final = 5
# Open answers end at once; this bounds the wait for clients that do not read.
_SHUTDOWN_S: Final = 1
# Longer than clients' own timeouts, so that clients close idle connections and no request is lost in a race.
_KEEP_ALIVE_S: Final = 75
# Hundreds of tokens as events.
_SEND_BUFFER_BYTES: Final = 64 * 1024

log = structlog.get_logger()


class Connection(H11Protocol):
    """HTTP connection with back-pressure: refused if there are too many, closed if its client is too slow.

    An answer is written as it is read: once the buffers between are full, writing waits, and the session with
    it. This bounds that wait; the request then ends as if the client had disconnected. A slow reader keeps
    its connection as long as it takes 256 bytes a second over each `patience_s`. A request that was begun has
    as long to arrive, and a little more for each byte, not counting time in which the server reads nothing
    since the body waits for its turn. Of a body that was answered before it was read only a little is
    received, to be thrown away; then the connection is closed.

    Args:
        max_connections: Most connections, idle ones included; requests of further ones get 503.
        patience_s: Time during which a client may take hardly anything that waits for it, or send part of a
            request.
        uvicorn: Arguments of uvicorn's connection.
    """

    def __init__(self, *, max_connections: int, patience_s: float, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._max_connections = max_connections
        self._patience_s = patience_s
        self._watch: asyncio.TimerHandle | None = None
        self._arrival: asyncio.TimerHandle | None = None
        self._arrival_due_s = 0.0
        self._num_discarded = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Count it, and bound the wait for its first request like that for a next one."""
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self.app = _Refusal(self.app, self._max_connections)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        """More of a request; a timer runs until it is complete."""
        super().data_received(data)
        self._watch_arrival(len(data))
        self._watch_rest(len(data))

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with an error object; close the connection if an answer has begun."""
        if self.cycle is not None and not self.cycle.response_complete:
            # The task that answers this request is to stop.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.abort()
            return
        body = json_bytes(error_body(InvalidRequest(msg)))
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        # The body of a HEAD may be malformed, too; its answer has none.
        with suppress(h11.LocalProtocolError):
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def pause_writing(self) -> None:
        """The buffer is full: check whether it is read."""
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        """There is room again."""
        self._stop_watching()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers; uvicorn cancels the answer."""
        self._stop_watching()
        self._stop_arrival()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; if its last answer is unread, without waiting for that."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self._cut()

    def _look_again(self) -> None:
        # While writing is paused nothing is added, so the size shows what was read.
        num_bytes = self.transport.get_write_buffer_size()
        self._watch = self.loop.call_later(self._patience_s, self._look, num_bytes)

    def _look(self, num_bytes_before: int) -> None:
        num_taken = num_bytes_before - self.transport.get_write_buffer_size()
        if num_taken >= self._patience_s * _LEAST_READ_BYTES_PER_S:
            self._look_again()
        else:
            self._cut(num_taken)

    def _cut(self, num_taken: int = 0) -> None:
        log.warning(
            "reader_cut_off",
            reason="the client did not read its answer",
            unread_bytes=self.transport.get_write_buffer_size(),
            taken_bytes=num_taken,
            patience_s=self._patience_s,
        )
        self.transport.abort()

    def _watch_arrival(self, num_bytes: int) -> None:
        state = self.conn.their_state
        if state is not h11.SEND_BODY and not (state is h11.IDLE and self.conn.trailing_data[0]):
            self._stop_arrival()
            return
        if self._arrival is None:
            self._arrival_due_s = self.loop.time() + self._patience_s
            self._arrival = self.loop.call_at(self._arrival_due_s, self._look_at_arrival)
        self._arrival_due_s += num_bytes / _LEAST_BYTES_PER_S

    def _watch_rest(self, num_bytes: int) -> None:
        """Read only a little of a body that is answered already, and leave time to read the answer."""
        if self.conn.our_state is not h11.DONE or self.conn.their_state is not h11.SEND_BODY:
            self._num_discarded = 0
            return
        self._num_discarded += num_bytes
        if self._num_discarded > _MOST_DISCARDED_BYTES and not self.flow.read_paused:
            self.flow.pause_reading()
            self.loop.call_later(_LINGER_S, self.transport.abort)

    def _look_at_arrival(self) -> None:
        if self.flow.read_paused:
            self._arrival_due_s = max(self._arrival_due_s, self.loop.time() + self._patience_s)
        if self.loop.time() < self._arrival_due_s:
            self._arrival = self.loop.call_at(self._arrival_due_s, self._look_at_arrival)
            return
        self._arrival = None
        log.warning(
            "sender_cut_off", reason="the request did not arrive in time", patience_s=self._patience_s
        )
        self.transport.abort()

    def _stop_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


class _Refusal:
    """Answer for connections beyond the limit: 503, then closed. `/health` still answers 200."""

    def __init__(self, app: ASGIApp, max_connections: int) -> None:
        self._app = app
        self._max_connections = max_connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        log.info("connection_refused", most=self._max_connections)
        response = error_response(
            ClusterError(
                f"{self._max_connections} connections are open, which is the limit: close some, or try"
                f" again in {_RETRY_AFTER_S} s",
                retry_after_s=_RETRY_AFTER_S,
            )
        )
        response.headers["Connection"] = "close"
        await response(scope, receive, send)


class _AsEvents(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Without the traceback: only answers ended by a shutdown get this far.
        log.log(record.levelno, "http_server", text=record.getMessage().strip())


class _Server(uvicorn.Server):
    """Server without signal handlers, and with an event for when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.accepting.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def most_connections() -> int:
    """1024, or half of the files that this process may open if that is less: links need some, too."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, soft // 2)


def route_uvicorn_log() -> None:
    """Send warnings and errors of uvicorn's logger to ours, once per process."""
    logger = logging.getLogger("uvicorn.error")
    if not any(isinstance(handler, _AsEvents) for handler in logger.handlers):
        logger.addHandler(_AsEvents())
        logger.setLevel(logging.WARNING)
        logger.propagate = False


@asynccontextmanager
async def serve_api(
    app: FastAPI,
    host: str,
    port: int,
    *,
    max_connections: int | None = None,
    patience_s: float = PATIENCE_S,
    is_insecure: bool = False,
) -> AsyncGenerator[str, None]:
    """Serve an app of `create_app` while the block runs; yields the base URL.

    The port is bound first, so a port in use is reported before anything else. At the end, open answers end
    with an error event and the sockets are closed, which takes well under a second. No signal handler is
    installed: the caller stops it by leaving the block or by cancellation.

    Args:
        app: From `create_app`.
        host: Name or address to listen on.
        port: 0 takes any free one.
        max_connections: Most connections; None for the result of `most_connections`.
        patience_s: Time during which a client may take hardly anything that waits for it, and for a request
            to arrive.
        is_insecure: Whether other machines may use it without a key.

    Raises:
        PortInUse: If another process listens there.
        MeshError: If the address is not this machine's, or if other machines can reach it and the app needs
            no API key.
    """
    has_keys = app.state.api_keys is not None
    require_key_beyond_loopback(host, has_keys=has_keys, is_insecure=is_insecure)
    route_uvicorn_log()
    listener = listen(host, port)
    bound_host, bound_port = listener.getsockname()[:2]
    most = most_connections() if max_connections is None else max_connections
    config = uvicorn.Config(
        LocalHosts(app) if is_loopback(host) and not has_keys else app,
        # A factory of connections works like their class.
        http=partial(Connection, max_connections=most, patience_s=patience_s),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await server.accepting.wait()
        yield f"http://{join_address(bound_host, bound_port)}"
    finally:
        app.state.backends.first.api.closing.set()
        server.should_exit = True
        await running


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        PortInUse: If another process listens there.
        MeshError: If it cannot be bound for another reason.
    """
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise MeshError(
            f"cannot listen on {host}: {reason}; give --host an address of this machine"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        # Without it a restart has to wait for the connections of the last run to time out.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by every connection; the kernel would buffer megabytes for one that is not read.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"another process listens on {join_address(host, port)}: stop it, or give another --port"
            ) from None
        raise MeshError(
            f"cannot listen on {join_address(host, port)}: {error.strerror}; give another --host or --port"
        ) from None
    listener.settimeout(0)
    return listener
