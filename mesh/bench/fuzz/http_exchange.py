"""One request as bytes, and what came back, over a connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import h11

if TYPE_CHECKING:
    from mesh.bench.fuzz.http_cases import HttpCase

# After half a request: how long an answer may come all the same before we say that no more will follow.
_MORE_S: Final = 0.05
_READ_BYTES: Final = 65536


@dataclass(frozen=True)
class Reply:
    """What a server did with one request.

    Attributes:
        status: Of its first answer; None if there was none.
        content_type: Of that answer.
        body: Of that answer, as far as it came.
        is_over: Whether the answer, or the connection, came to its end in time.
    """

    status: int | None
    content_type: str
    body: bytes
    is_over: bool


async def exchange(port: int, case: HttpCase, timeout_s: float) -> Reply:
    """Send a request to 127.0.0.1 and read its first answer.

    A request that is not whole is followed by the end of what the client sends; the server then has nothing
    to wait for.

    Args:
        port: The server's.
        case: The request.
        timeout_s: For the whole exchange.

    Raises:
        OSError: If nobody listens.
    """
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    # The answer's framing depends on nothing else of the request.
    method = b"HEAD" if case.data.startswith(b"HEAD ") else b"GET"
    client.send(h11.Request(method=method, target=b"/", headers=[(b"Host", b"x")]))
    client.send(h11.EndOfMessage())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = _Found()
    try:
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(ConnectionError):
                writer.write(case.data)
                await writer.drain()
                if not case.is_whole:
                    await asyncio.sleep(_MORE_S)
                    writer.write_eof()
                await _read(reader, client, found)
            found.is_over = True
    except TimeoutError:
        pass
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return Reply(found.status, found.content_type, bytes(found.body), found.is_over)


class _Found:
    def __init__(self) -> None:
        self.status: int | None = None
        self.content_type = ""
        self.body = bytearray()
        self.is_over = False


async def _read(reader: asyncio.StreamReader, client: h11.Connection, found: _Found) -> None:
    while True:
        try:
            event = client.next_event()
        except h11.RemoteProtocolError:
            return
        if event is h11.NEED_DATA:
            client.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            found.status = event.status_code
            found.content_type = next(
                (value.decode("latin-1") for name, value in event.headers if name == b"content-type"), ""
            )
        elif isinstance(event, h11.Data):
            found.body += event.data
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed) or event is h11.PAUSED:
            return
