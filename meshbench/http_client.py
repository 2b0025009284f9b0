"""HTTP/1.1 client that takes times at the socket."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast
from urllib.parse import urlsplit

import h11

from meshbench.request_record import Failure
from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.addresses import join_address
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshbench.request_record import AnswerReading

# Servers close connections that have been idle for some seconds. A request that crosses with that would fail
# without any fault.
_MAX_IDLE_S: Final = 1.0
_USER_AGENT: Final = f"spanmesh/{SOFTWARE_VERSION}"

EndpointName = Literal["chat", "completions"]


class Receiver(Protocol):
    """Takes a response as it comes; called from the socket's own callback, so quick, and never raising."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Status and headers, the names in lower case."""

    def on_body(self, data: bytes, now_s: float) -> None:
        """The next bytes of the body, and when the event loop got them from the socket."""


class WholeBody:
    """Keeps a response in one piece; implements `Receiver`.

    Attributes:
        status: HTTP status; 0 before the response.
        body: The bytes so far.
    """

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:  # noqa: ARG002 - the protocol's
        """Status and headers; only the status is kept."""
        self.status = status

    def on_body(self, data: bytes, now_s: float) -> None:  # noqa: ARG002 - the protocol's
        """The next bytes of the body."""
        self.body += data


class StaleConnectionError(ConnectionError):
    """A connection that had been used before was closed without a byte of a response.

    The server closed it as idle while the request was on its way, so it never saw the request.
    """


class Connection(asyncio.Protocol):
    """Sends requests one after another and hands on the responses.

    Responses are taken apart where the bytes come in: no task has to wake up for a chunk, and the time is
    read before anything looks at it.

    Args:
        clock_s: Monotonic, seconds.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._http = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._complete: asyncio.Future[None] | None = None
        self._was_used = False
        self._is_silent = True

    @property
    def is_reusable(self) -> bool:
        """Whether it is open and takes another request."""
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_open and self._http.our_state is h11.IDLE

    async def exchange(
        self,
        request: h11.Request,
        body: bytes,
        receiver: Receiver,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a request and wait for the end of its response.

        Args:
            request: Its head.
            body: Its body, perhaps empty.
            receiver: Takes the response.
            on_sent: Called once the whole request was handed to the socket.

        Raises:
            StaleConnectionError: If it is to be sent again over another connection.
            ConnectionError: If the connection breaks, or the other end does not speak HTTP.
        """
        assert self._transport is not None  # noqa: S101 - the owner of the connection opened it
        self._receiver, self._is_silent = receiver, True
        self._complete = asyncio.get_running_loop().create_future()
        parts = [self._http.send(request)]
        if body:
            parts.append(self._http.send(h11.Data(data=body)))
        parts.append(self._http.send(h11.EndOfMessage()))
        self._transport.write(b"".join(part for part in parts if part))
        if on_sent is not None:
            on_sent()
        try:
            await self._complete
        finally:
            self._receiver = self._complete = None
        self._was_used = True
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            self.close()

    def close(self) -> None:
        """Close it at once: the server sees its client gone."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        now_s = self._clock_s()
        self._is_silent = False
        self._feed(data, now_s)

    def eof_received(self) -> None:
        """Called by the event loop: this may be how the response ends."""
        self._feed(b"", self._clock_s())

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._fail(f"the connection broke: {exc}" if exc else "the client closed the connection")

    def _feed(self, data: bytes, now_s: float) -> None:
        try:
            self._http.receive_data(data)
            while not isinstance(event := self._http.next_event(), type):
                self._hand_on(event, now_s)
                if isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                    break
        except h11.RemoteProtocolError as error:
            if data:
                self._fail(f"the server's answer is not HTTP: {error}")
            else:
                self._fail("the server closed the connection before the end of its answer")
            self.close()

    def _hand_on(self, event: h11.Event, now_s: float) -> None:
        if self._receiver is None or self._complete is None:
            return
        if isinstance(event, h11.Response):
            self._receiver.on_head(event.status_code, dict(event.headers))
        elif isinstance(event, h11.Data):
            self._receiver.on_body(event.data, now_s)
        elif isinstance(event, h11.EndOfMessage) and not self._complete.done():
            self._complete.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._complete is not None and not self._complete.done():
            is_stale = self._was_used and self._is_silent
            self._complete.set_exception((StaleConnectionError if is_stale else ConnectionError)(reason))


class ConnectionPool:
    """Connection pool for one server, of unlimited size.

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
        """Close idle connections."""
        while self._idle:
            self._idle.pop()[0].close()


class Client:
    """The measuring client.

    Args:
        server: The server.
        api_key: API key of each request, if the server needs one.
        timeout_s: Limit of a request; a longer one counts as failed.
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
            return Failure("timeout", f"no end of the answer within {self._timeout_s:g} s")
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


@dataclass(frozen=True)
class Server:
    """An OpenAI server's address."""

    url: str
    """As it is shown."""
    host: str
    """Name or address."""
    port: int
    """TCP port."""
    is_tls: bool
    """Whether it is spoken to over TLS."""
    prefix: str
    """Path before `/v1`, often empty."""

    def __str__(self) -> str:
        """The URL as it is shown."""
        return self.url

    @property
    def base_url(self) -> str:
        """URL before `/v1`, for other paths."""
        return f"{'https' if self.is_tls else 'http'}://{self.host_header}{self.prefix}"

    @property
    def host_header(self) -> str:
        """Value of the `Host` header."""
        return join_address(self.host, self.port)


def one_line(error: OSError) -> str:
    """Error text of the system."""
    return " ".join((error.strerror or str(error)).split())


def parse_url(url: str) -> Server:
    """From `http://HOST:PORT`, with or without the `/v1` that clients of OpenAI put behind it.

    Raises:
        InvalidRequest: If it is no such address.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(
            f"{url!r} is no address ({error}); write http://HOST:PORT", param="--url"
        ) from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidRequest(f"{url!r} is not an address; write http://HOST:PORT", param="--url")
    is_tls = parts.scheme == "https"
    return Server(
        url=url,
        host=parts.hostname,
        port=port if port is not None else (443 if is_tls else 80),
        is_tls=is_tls,
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
    )
