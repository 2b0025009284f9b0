"""The socket that the API listens on, and its life inside a running event loop."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import uvicorn

from mesh.api.connection import PATIENCE_S, Connection, most_connections
from mesh.api.exposure import require_key_beyond_loopback
from mesh.api.local_hosts import LocalHosts
from mesh.api.uvicorn_log import route_uvicorn_log
from mesh.cluster.addresses import is_loopback
from spanmesh_proto.addresses import join_address
from spanmesh_proto.errors import MeshError, PortInUse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from fastapi import FastAPI

# Open answers end at once; this bounds the wait for clients that do not read.
_SHUTDOWN_S: Final = 1
# Longer than the clients' own, so that it is they who close idle connections and none is lost in a race.
_KEEP_ALIVE_S: Final = 75
# Hundreds of tokens as events.
_SEND_BUFFER_BYTES: Final = 64 * 1024


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
    """Serve an app of `create_app` while the block runs; give the base URL.

    The port is bound first, so a port in use is known before anything else. On leaving, open answers end
    with an error event and the sockets are closed, which takes well under a second. No signal handler is
    set: stopping is up to the caller, by leaving the block or by cancellation.

    Args:
        app: From `create_app`.
        host: Name or address to listen on.
        port: 0 takes any free one.
        max_connections: At once; None for what `most_connections` says.
        patience_s: How long a client may take hardly anything while something waits for it, and how long a
            request may take to arrive.
        is_insecure: Whether other machines may use it without a key.

    Raises:
        PortInUse: If another process listens there.
        MeshError: If the address is not this machine's, or if it can be reached from other machines and
            the app asks for no API key.
    """
    needs_key = app.state.needs_key
    require_key_beyond_loopback(host, has_keys=needs_key, is_insecure=is_insecure)
    route_uvicorn_log()
    listener = listen(host, port)
    bound_host, bound_port = listener.getsockname()[:2]
    most = most_connections() if max_connections is None else max_connections
    config = uvicorn.Config(
        LocalHosts(app) if is_loopback(host) and not needs_key else app,
        # Whatever makes connections will do.
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
        app.state.backends.first.closing.set()
        server.should_exit = True
        await running


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound but accepts nothing yet.

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
        # Every connection has it from here; the kernel would keep megabytes for one that is not read.
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


class _Server(uvicorn.Server):
    """Leaves the process's signal handlers alone, and says when it accepts connections."""

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
