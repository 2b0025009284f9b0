"""A joined host's certificate, and when to ask for the next one."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import TYPE_CHECKING

from cryptography import x509

from spanmesh_proto.errors import MeshError
from stages.transport.channels import Identity, NewKey

if TYPE_CHECKING:
    from collections.abc import Callable


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def renewal_in_s(certificate_pem: bytes, now: dt.datetime) -> float:
    """Seconds until two thirds of what is left of a certificate's life are over.

    Args:
        certificate_pem: Fresh from the head.
        now: Aware time. However wrong this clock is, the head is not asked more than once a second.
    """
    left = x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc - now
    return max(left.total_seconds() * 2 / 3, 1.0)


class HostCertificate:
    """Keys are made here, the head certifies them, the latest certificate counts. For one event loop.

    Args:
        authority_pem: The head's certificate, which the join token pins.
        clock: Aware time.
    """

    def __init__(self, authority_pem: bytes, *, clock: Callable[[], dt.datetime] = _now) -> None:
        self._authority_pem = authority_pem
        self._clock = clock
        self._key = NewKey()
        self._identity: Identity | None = None
        self._taken = asyncio.Event()

    def request_pem(self) -> bytes:
        """A request for a key made just now."""
        self._key = NewKey()
        self._taken.clear()
        return self._key.request_pem()

    def take(self, certificate_pem: bytes) -> None:
        """What came of the latest request."""
        self._identity = self.with_certificate(certificate_pem)
        self._taken.set()

    def with_certificate(self, certificate_pem: bytes) -> Identity:
        """The key of the latest request with another certificate that was made for it."""
        return self._key.identity(certificate_pem, self._authority_pem)

    def identity(self) -> Identity:
        """What to show peers from now on.

        Raises:
            MeshError: If nothing was taken yet.
        """
        if self._identity is None:
            raise MeshError("this host has no certificate yet")
        return self._identity

    async def due(self) -> None:
        """Return when there is a certificate and it is time to ask for the next one."""
        await self._taken.wait()
        await asyncio.sleep(renewal_in_s(self.identity().certificate_pem, self._clock()))
