"""A head that does nothing but send stages: real TLS and gRPC on loopback, no Ray."""

from __future__ import annotations

import datetime as dt
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from mesh.cluster.addresses import free_port
from mesh.cluster.certificates import Authority, make_certificate
from mesh.cluster.host_facts import read_versions
from mesh.cluster.join_token import JoinToken
from mesh.cluster.members import Members
from mesh.cluster.membership_server import MembershipServer, MembershipService, RayAccess
from stages.weights.fetch import FetchSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stages.weights.fetch import RateLimit
    from stages.weights.stage_cache import StageCache

_ADDRESS: Final = "127.0.0.1"
_SECRET: Final = "bench"  # noqa: S105 - opens what is on loopback for some seconds
_FAR_FUTURE_S: Final = 2**39


@asynccontextmanager
async def sending_head(cache: StageCache, rate: RateLimit | None = None) -> AsyncIterator[FetchSource]:
    """Sends the stages of a cache while in the block; gives where to fetch them.

    Args:
        cache: Knows the stages.
        rate: How fast they are sent.
    """
    certificate = make_certificate(dt.datetime.now(dt.UTC))
    address = f"{_ADDRESS}:{free_port(_ADDRESS)}"
    service = MembershipService(
        token=JoinToken((address,), _SECRET, certificate.fingerprint, _FAR_FUTURE_S),
        ray=RayAccess("", ""),
        members=Members(),
        cache=cache,
        versions=read_versions(),
        authority=Authority(certificate),
        rate=rate,
    )
    server = MembershipServer(service, certificate)
    await server.start(_ADDRESS, int(address.rpartition(":")[2]))
    try:
        yield FetchSource(address, certificate.certificate_pem, _SECRET)
    finally:
        await server.stop()
