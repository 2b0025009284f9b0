"""Clients that do what no library does: they stop reading, or hang up without a word."""

import asyncio
import json
import socket
from typing import Any

from tests.support.api_harness import Api
from tests.support.ring_api import CHAT


def request_bytes(fields: dict[str, Any], path: str = CHAT, key: str = "none") -> bytes:
    body = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class RawClient:
    """One connection with a small buffer, read only when asked."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    async def connect(cls, api: Api) -> "RawClient":
        host, port = api.url.removeprefix("http://").split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        sock.settimeout(0)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        return cls(sock)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def read(self, num_bytes: int = 65536) -> bytes:
        """Some of what was sent; nothing at the end."""
        return await asyncio.get_running_loop().sock_recv(self._socket, num_bytes)

    async def read_until(self, mark: bytes) -> bytes:
        """All up to where `mark` has come."""
        data = bytearray()
        while mark not in data:
            more = await self.read()
            if not more:
                break
            data += more
        return bytes(data)

    def hang_up(self) -> None:
        self._socket.close()


def events_of(response: bytes) -> list[dict[str, Any]]:
    """The JSON events of a whole response in chunks."""
    _head, _, rest = response.partition(b"\r\n\r\n")
    body = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        body += rest[:length]
        rest = rest[length + 2 :]
    lines = body.decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
