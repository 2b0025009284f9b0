"""One HTTP/1.1 connection, and the clock at its socket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

import h11

if TYPE_CHECKING:
    from collections.abc import Callable


class Receiver(Protocol):
    """Takes a response as it comes; called from the socket's own callback, so quick, and never raising."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Status and headers, the names in lower case."""

    def on_body(self, data: bytes, now_s: float) -> None:
        """The next bytes of the body, and when the event loop got them from the socket."""


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
        assert self._transport is not None  # noqa: S101 - whoever has the connection opened it
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
        self._fail(f"the connection broke: {exc}" if exc else "this client closed the connection")

    def _feed(self, data: bytes, now_s: float) -> None:
        try:
            self._http.receive_data(data)
            while not isinstance(event := self._http.next_event(), type):
                self._hand_on(event, now_s)
                if isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                    break
        except h11.RemoteProtocolError as error:
            if data:
                self._fail(f"the server's answer is no HTTP: {error}")
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
