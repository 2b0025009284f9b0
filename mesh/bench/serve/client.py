"""Asks one server. What goes wrong on the way is noted, not raised: failures are figures too."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import h11

from mesh.bench.serve.connection import StaleConnectionError
from mesh.bench.serve.pool import ConnectionPool
from mesh.bench.serve.record import Failure
from spanmesh_proto import SOFTWARE_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.bench.serve.connection import Receiver
    from mesh.bench.serve.endpoint import Server
    from mesh.bench.serve.reading import AnswerReading

_USER_AGENT: Final = f"spanmesh/{SOFTWARE_VERSION}"


class Client:
    """The measuring client.

    Args:
        server: Whom to ask.
        api_key: Goes with each request, if the server wants one.
        timeout_s: A request that takes longer has failed.
        clock_s: Monotonic, seconds.
    """

    def __init__(
        self, server: Server, *, api_key: str | None, timeout_s: float, clock_s: Callable[[], float]
    ) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._pool = ConnectionPool(server, clock_s)
        self._headers = [("Host", server.host_header), ("User-Agent", _USER_AGENT), ("Accept", "*/*")]
        if api_key is not None:
            self._headers.append(("Authorization", f"Bearer {api_key}"))

    async def ask(
        self,
        path: str,
        body: bytes,
        reading: AnswerReading,
        *,
        on_sent: Callable[[], None] | None = None,
    ) -> Failure | None:
        """Send one request and read its streamed answer.

        Args:
            path: From `/v1` on.
            body: JSON.
            reading: Takes the answer.
            on_sent: Called once the request was written; again if it had to be sent again.

        Returns:
            What the network did to it; what the server did is for `reading` to say.
        """
        try:
            await self.exchange("POST", path, body, reading, on_sent=on_sent)
        except TimeoutError:
            return Failure("timeout", f"no end within {self._timeout_s:g} s")
        except OSError as error:
            return Failure("broken_off" if reading.has_begun else "connection", one_line(error))
        return None

    async def exchange(
        self,
        method: str,
        path: str,
        body: bytes,
        receiver: Receiver,
        *,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send any request, and wait for the end of its response.

        To cancel it closes the connection at once.

        Raises:
            TimeoutError: If it takes too long.
            OSError: If the connection cannot be opened, or breaks.
        """
        headers = [*self._headers, ("Content-Length", str(len(body)))]
        if body:
            headers.append(("Content-Type", "application/json"))
        request = h11.Request(method=method, target=self._server.prefix + path, headers=headers)
        async with asyncio.timeout(self._timeout_s):
            while True:
                connection = await self._pool.take()
                try:
                    await connection.exchange(request, body, receiver, on_sent)
                except StaleConnectionError:
                    # As every client does that keeps connections; the time it took counts.
                    continue
                except BaseException:
                    connection.close()
                    raise
                self._pool.give_back(connection)
                return

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()


def one_line(error: OSError) -> str:
    """What the system says."""
    return " ".join((error.strerror or str(error)).split())
