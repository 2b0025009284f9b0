"""Addresses and ports of this host."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import os
import socket
from typing import TYPE_CHECKING, Final

import psutil

from spanmesh_proto.addresses import join_address
from spanmesh_proto.errors import ClusterError, PortInUse

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOPBACK: Final = "127.0.0.1"
# Documentation addresses (RFC 5737, RFC 3849): routed like any other, and never assigned to a host.
_ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")
_ANY_PORT: Final = 9
# Below the ports that systems give to outgoing connections (Linux from 32768, macOS and Windows from 49152)
# and above those that Ray gives to its workers (10002 to 19999).
_LISTENING_PORTS: Final = range(20_000, 32_768)
# Each process starts at ports of its own, so that two that look for one at once do not find the same.
_ports_tried: Final = itertools.count(os.getpid() * 64)


def primary_address(*towards: str) -> str:
    """The IP address from which this host sends packets to another; loopback if there is no route.

    Connecting a datagram socket only queries the routing table: nothing is sent.

    Args:
        towards: IP addresses or names of the other host, the preferred one first; by default one beyond the
            default route, by IPv4 if there is such a route, else by IPv6.
    """
    for other in towards or _ELSEWHERE:
        with contextlib.suppress(OSError):
            for family, kind, protocol, _, where in socket.getaddrinfo(
                other, _ANY_PORT, type=socket.SOCK_DGRAM
            ):
                with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                    probe.connect(where)
                    return str(probe.getsockname()[0])
    return LOOPBACK


def advertised(text: str) -> str:
    """An address of this host as the operator writes it, in canonical form.

    Args:
        text: A name, which stays as it is, or an IP address; one of IPv6 with or without brackets.

    Raises:
        ClusterError: If other hosts cannot reach this one by it.
    """
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return text
    if address.is_unspecified:
        raise ClusterError(
            f"--advertise {text} means every address of this host, which other hosts cannot reach: name one",
            param="--advertise",
        )
    if isinstance(address, ipaddress.IPv6Address) and address.is_link_local:
        raise ClusterError(
            f"--advertise {text} is link-local: another host can use it only with the name of its "
            "interface behind it; name a global or a unique local address (fd00::/8)",
            param="--advertise",
        )
    return str(address)


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine to itself only."""
    address = _parsed(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def is_of_this_machine(*hosts: str) -> bool:
    """Whether all of some addresses are this machine's at this moment; names are none."""
    wanted = [_parsed(host) for host in hosts]
    own = {_parsed(address) for address in _interface_addresses()}
    return all(address is not None and (address.is_loopback or address in own) for address in wanted)


def _interface_addresses() -> Iterator[str]:
    """All addresses of this machine's interfaces; link-local ones of IPv6 with the interface's name."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family in {socket.AF_INET, socket.AF_INET6}:
                yield each.address


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address; one of IPv4 in the form that sockets of both versions give it is one of IPv4."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def free_port(host: str) -> int:
    """A TCP port that is free at `host` now, and that no outgoing connection takes before it is listened on.

    Raises:
        ClusterError: If `host` is no address of this machine.
    """
    for _ in _LISTENING_PORTS:
        port = _LISTENING_PORTS[next(_ports_tried) % len(_LISTENING_PORTS)]
        with contextlib.suppress(PortInUse), _bound(host, port):
            return port
    with _bound(host, 0) as listener:
        return int(listener.getsockname()[1])


def check_port_free(host: str, port: int, option: str) -> None:
    """Check before any long work that `host:port` can be listened on.

    Args:
        host: Address to bind.
        port: TCP port; 0 is always free.
        option: Option to name in the message.

    Raises:
        PortInUse: If another process listens there.
        ClusterError: If `host` is no address of this machine, or the port needs privileges.
    """
    try:
        _bound(host, port).close()
    except PortInUse as error:
        raise PortInUse(f"{error.message}; choose another with {option}", param=option) from None


def is_free_everywhere(port: int) -> bool:
    """Whether no process listens on a TCP port at any address of this host, as Ray's servers need it."""
    for every in ("0.0.0.0", "::"):  # noqa: S104 - bound for a moment, and never listened on
        try:
            _bound(every, port).close()
        except PortInUse:
            return False
        except (ClusterError, OSError):
            # This system has no IPv6, or no IPv4.
            continue
    return True


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ClusterError(f"{host!r} is not an address: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        # As servers do; without it a port counts as taken for a minute after its last use.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
    except OSError as error:
        listener.close()
        place = join_address(host, port)
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"another process listens on {place}") from None
        raise ClusterError(f"cannot listen on {place}: {os.strerror(error.errno or 0)}") from error
    return listener
