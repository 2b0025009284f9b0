"""Discovery of heads by mDNS.

An announcement is public: a name, an address, versions, and the beginning of the certificate's hash, by which
the owner of a join token recognises its head. The answering head must prove its identity as always: an
announcement admits no host and is not trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ipaddress
import itertools
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from mesh.cluster.members import check_name
from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto.addresses import join_address, split_address
from spanmesh_proto.errors import ClusterError, MeshError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from types import ModuleType

    from mesh.cluster.join_token import JoinToken

SERVICE: Final = "_spanmesh._tcp.local."
# Hex digits of the certificate's sha256: enough to tell heads apart.
_FINGERPRINT_CHARS: Final = 16
_POLL_S: Final = 3.0
_MOST_HEADS: Final = 64
_MOST_ADDRESSES: Final = 8
# mDNS limits a service name to 63 bytes, of which a dot and the fingerprint follow the host's name.
_NAME_CHARS: Final = 63 - 1 - _FINGERPRINT_CHARS


@dataclass(frozen=True)
class HeadFound:
    """A head as announced."""

    name: str
    """Name of its host."""
    address: str
    """`host:port` of its membership service."""
    fingerprint: str
    """The first digits of its certificate's sha256, hex."""
    software: str = SOFTWARE_VERSION
    """Version of spanmesh."""
    protocol: int = PROTOCOL_VERSION
    """Version of the protocol."""


def heads_found(name: str, token: JoinToken) -> tuple[HeadFound, ...]:
    """The announcement of a head, by each of its addresses; none of it is secret."""
    fingerprint = token.fingerprint.hex()[:_FINGERPRINT_CHARS]
    return tuple(HeadFound(name, address, fingerprint) for address in token.addresses)


def with_found(token: JoinToken, heads: Sequence[HeadFound]) -> JoinToken:
    """The token with all announced addresses of its head before its own ones."""
    mine = token.fingerprint.hex()[:_FINGERPRINT_CHARS]
    found = [head.address for head in heads if head.fingerprint == mine]
    return replace(token, addresses=tuple(dict.fromkeys((*found, *token.addresses))))


@contextlib.asynccontextmanager
async def announced(heads: Sequence[HeadFound], *, is_wanted: bool) -> AsyncIterator[None]:
    """Announce a head while in the block.

    Args:
        heads: The announcement, by each address of the head; all have the same port.
        is_wanted: Whether to announce at all.

    Raises:
        ClusterError: If the package for mDNS is missing, or the address is none of this host.
    """
    if not is_wanted:
        yield
        return
    zeroconf = _zeroconf()
    head, hosts = heads[0], [split_address(each.address)[0] for each in heads]
    _, port = split_address(head.address)
    info = zeroconf.asyncio.AsyncServiceInfo(
        SERVICE,
        f"{head.name[:_NAME_CHARS]}.{head.fingerprint}.{SERVICE}",
        addresses=[ipaddress.ip_address(host).packed for host in hosts],
        port=port,
        properties={
            "name": head.name,
            "fingerprint": head.fingerprint,
            "software": head.software,
            "protocol": str(head.protocol),
        },
        server=f"{head.fingerprint}.local.",
    )
    try:
        service = zeroconf.asyncio.AsyncZeroconf(interfaces=hosts)
    except OSError as error:
        raise ClusterError(f"cannot announce the head by mDNS at {', '.join(hosts)}: {error}") from error
    try:
        await service.async_register_service(info)
    except (OSError, zeroconf.Error) as error:
        await service.async_close()
        raise ClusterError(f"cannot announce the head by mDNS at {', '.join(hosts)}: {error}") from error
    try:
        yield
    finally:
        await service.async_unregister_service(info)
        await service.async_close()


async def discover_heads(
    *, seconds: float = _POLL_S, interfaces: Sequence[str] | None = None
) -> tuple[HeadFound, ...]:
    """Announced heads within some seconds, sorted by name; one that has several addresses is there by each.

    Args:
        seconds: Listening time.
        interfaces: Addresses of this host to listen on; all unless given.

    Raises:
        ClusterError: If mDNS cannot be used here.
    """
    zeroconf = _zeroconf()
    names: set[str] = set()

    def note(*, name: str, state_change: Any, **_: Any) -> None:
        if state_change is not zeroconf.ServiceStateChange.Removed and len(names) < _MOST_HEADS:
            names.add(name)

    try:
        service = zeroconf.asyncio.AsyncZeroconf(
            interfaces=zeroconf.InterfaceChoice.Default if interfaces is None else list(interfaces)
        )
    except OSError as error:
        raise ClusterError(f"cannot listen for mDNS: {error}") from error
    try:
        browser = zeroconf.asyncio.AsyncServiceBrowser(service.zeroconf, SERVICE, handlers=[note])
        await asyncio.sleep(seconds)
        await browser.async_cancel()
        infos = []
        for name in sorted(names):
            # Announcements are untrusted, malformed names included.
            with contextlib.suppress(zeroconf.Error):
                infos.append(zeroconf.asyncio.AsyncServiceInfo(SERVICE, name))
        await asyncio.gather(*(info.async_request(service.zeroconf, 1000) for info in infos))
    finally:
        await service.async_close()
    return tuple(itertools.chain.from_iterable(_heads(info) for info in infos))


def _heads(info: Any) -> tuple[HeadFound, ...]:
    """None if the announcement, which is untrusted, is malformed."""
    try:
        told = {key.decode(): value.decode() for key, value in info.properties.items() if value is not None}
        check_name(told["name"])
        packed = info.addresses[:_MOST_ADDRESSES]
        addresses = [join_address(socket.inet_ntop(socket.AF_INET, each), int(info.port)) for each in packed]
        for address in addresses:
            split_address(address)
        if not all(told[key].replace(".", "").isalnum() for key in ("fingerprint", "software")):
            return ()
        versions = told["software"], int(told["protocol"])
    except (KeyError, ValueError, OSError, MeshError):
        return ()
    return tuple(HeadFound(told["name"], each, told["fingerprint"], *versions) for each in addresses)


def _zeroconf() -> ModuleType:
    try:
        zeroconf: ModuleType = importlib.import_module("zeroconf")
        importlib.import_module("zeroconf.asyncio")
    except ImportError:
        raise ClusterError(
            "mDNS needs the package zeroconf: pip install 'spanmesh[discover]', or leave the option out and "
            "give hosts the join token's address"
        ) from None
    return zeroconf
