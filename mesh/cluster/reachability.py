"""Reachability of a joining host from the head."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from typing import Final

from spanmesh_proto.addresses import join_address
from spanmesh_proto.errors import HostUnreachable, JoinError

NONCE_BYTES: Final = 16


class CheckListener:
    """On the joining host: sends its nonce to each connection, until closed."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._server: asyncio.Server | None = None

    async def open(self, address: str) -> int:
        """Listen on a free port of `address`; returns the port.

        Raises:
            JoinError: If it is no address of this host.
        """
        try:
            self._server = await asyncio.start_server(self._answer, address, 0)
        except OSError as error:
            raise JoinError(
                f"cannot listen on {address}: {error.strerror or error}; --advertise must be an address of "
                "this host"
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self.nonce)
        writer.close()


async def check_reachable_back(address: str, port: int, nonce: bytes, *, timeout_s: float) -> None:
    """At the head: connect to the joining host at its advertised address.

    Args:
        address: Address that the host advertises.
        port: Port of its `CheckListener`.
        nonce: Expected answer, so that another machine at the address is detected.
        timeout_s: For the whole check.

    Raises:
        HostUnreachable: Naming the address that was tried.
    """
    place = join_address(address, port)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                answer = await reader.read(NONCE_BYTES)
            finally:
                writer.transport.abort()
    except TimeoutError:
        reason = f"no answer within {timeout_s:g} s"
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        if len(nonce) == NONCE_BYTES and hmac.compare_digest(answer, nonce):
            return
        reason = "another machine answers"
    raise HostUnreachable(
        f"the head cannot reach this host back at {place}: {reason}; advertise an address that the head "
        "can reach "
        "with --advertise, and let it through the firewall"
    )
