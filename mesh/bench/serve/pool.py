"""Connections that are kept open between requests."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Final

from mesh.bench.serve.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.bench.serve.endpoint import Server

# Servers close connections that have been idle for some seconds. A request that crosses with that would fail
# through nobody's fault.
_MAX_IDLE_S: Final = 1.0


class ConnectionPool:
    """As many connections to one server as are needed at once.

    Args:
        server: Where.
        clock_s: Monotonic, seconds.
    """

    def __init__(self, server: Server, clock_s: Callable[[], float]) -> None:
        self._server = server
        self._clock_s = clock_s
        self._tls = ssl.create_default_context() if server.is_tls else None
        self._idle: list[tuple[Connection, float]] = []

    async def take(self) -> Connection:
        """An open connection.

        Raises:
            OSError: If none can be opened.
        """
        while self._idle:
            connection, since_s = self._idle.pop()
            if connection.is_reusable and self._clock_s() - since_s <= _MAX_IDLE_S:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._clock_s), self._server.host, self._server.port, ssl=self._tls
        )
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep it for the next request."""
        if connection.is_reusable:
            self._idle.append((connection, self._clock_s()))

    def close(self) -> None:
        """Close those that nobody uses."""
        while self._idle:
            self._idle.pop()[0].close()
