"""Addresses and ports of this host."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import os
import socket
import time
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from spanmesh_proto.addresses import is_loopback, join_address, parsed_ip
from spanmesh_proto.errors import ClusterError, PortInUse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOOPBACK: Final = "127.0.0.1"
# Documentation addresses (RFC 5737, RFC 3849): routed like any other, and never assigned to a host.
_ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")
_ANY_PORT: Final = 9
# Of bridges and tunnels that engines of containers and virtual machines make.
_INWARD_INTERFACES: Final = (
    *("docker", "br-", "podman", "cni", "cbr", "flannel", "cali", "kube", "virbr", "lxcbr", "lxdbr"),
    *("incusbr", "vboxnet", "vmnet"),
)
# Of Linux; its fields are address, interface's index, prefix, scope, flags and interface.
_IPV6_ADDRESSES: Final = Path("/proc/net/if_inet6")
# IFA_F_TEMPORARY, IFA_F_DADFAILED, IFA_F_DEPRECATED and IFA_F_TENTATIVE of linux/if_addr.h.
_PASSING_FLAGS: Final = 0x01 | 0x08 | 0x20 | 0x40
# Below the ports that systems give to outgoing connections (Linux from 32768, macOS and Windows from 49152)
# and above those that Ray gives to its workers (10002 to 19999).
_LISTENING_PORTS: Final = range(20_000, 32_768)
# Each process starts at ports of its own, so that two that look for one at once do not find the same.
_ports_tried: Final = itertools.count(os.getpid() * 64)


@dataclass(frozen=True)
class InterfaceAddress:
    """An address of an interface of this host."""

    interface: str
    """Name of the interface."""
    address: IPv4Address | IPv6Address
    """The address."""
    network: IPv4Network | IPv6Network
    """The network that is reached through it without a router."""
    is_lasting: bool = True
    """Whether it stays: one of IPv6 may be temporary, for a day or so, or about to go."""
    is_up: bool = True
    """Whether the interface works."""


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
                    return lasting(str(probe.getsockname()[0]), interface_addresses())
    return LOOPBACK


def resolved(host: str) -> tuple[str, ...]:
    """IP addresses that a name means here at this moment, in ascending order; an address means itself."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return (host,)
    return tuple(sorted({str(where[0]) for *_, where in found}))


def interface_addresses() -> tuple[InterfaceAddress, ...]:
    """Addresses of all interfaces, as they are at this moment; empty where the system does not tell."""
    try:
        states, told = psutil.net_if_stats(), psutil.net_if_addrs()
    except OSError:
        return ()
    passing = _passing_addresses()
    found = []
    for interface, addresses in told.items():
        is_up = interface not in states or states[interface].isup
        for each in addresses:
            # Link-local ones of IPv6 have the name of their interface behind them.
            address = parsed_ip(each.address) if each.family in {socket.AF_INET, socket.AF_INET6} else None
            if address is not None:
                mask = parsed_ip(each.netmask or "")
                prefix = address.max_prefixlen if mask is None else int(mask).bit_count()
                network = ipaddress.ip_network((int(address), prefix), strict=False)
                found.append(InterfaceAddress(interface, address, network, address not in passing, is_up))
    return tuple(found)


def _passing_addresses() -> frozenset[IPv6Address]:
    """Addresses of IPv6 that are temporary, deprecated or unusable yet; none where no system says so."""
    try:
        lines = _IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        return frozenset()
    fields = [line.split() for line in lines]
    return frozenset(IPv6Address(int(each[0], 16)) for each in fields if int(each[4], 16) & _PASSING_FLAGS)


def lasting(address: str, found: Sequence[InterfaceAddress]) -> str:
    """An address of the same interface and network that stays, for one of IPv6 that does not.

    Systems send from temporary addresses where they have such.

    Args:
        address: An address of this host.
        found: Addresses of its interfaces.
    """
    own = next((each for each in found if str(each.address) == address), None)
    if own is None or own.is_lasting:
        return address
    beside = (each for each in found if each.is_lasting and _link(each) == _link(own))
    return str(next(beside, own).address)


def ranked(found: Sequence[InterfaceAddress], routed: Sequence[str] = ()) -> tuple[str, ...]:
    """Addresses at which other hosts may reach this one, the best first: one in each interface's network.

    All are of one version of IP, version 4 if there are such. Networks for the containers and virtual
    machines of this machine, and addresses that a machine gives itself for lack of a router, count only if
    there are no others: many machines have the same ones.

    Args:
        found: Addresses of this host's interfaces.
        routed: Addresses of the default routes, the preferred one first.
    """
    usable = [each for each in found if each.is_up and not _means_another_elsewhere(each.address)]
    first = [each for address in routed for each in usable if str(each.address) == address]
    by_link: dict[tuple[str, IPv4Network | IPv6Network], InterfaceAddress] = {}
    for each in sorted((*first, *usable), key=lambda each: (each.address.version, not each.is_lasting)):
        by_link.setdefault(_link(each), each)
    best = list(by_link.values())
    best = [each for each in best if str(each.address) in routed or not _is_inward(each)] or best
    best = [each for each in best if each.address.version == best[0].address.version]
    return tuple(str(each.address) for each in sorted(best, key=lambda each: each not in first))


def _link(each: InterfaceAddress) -> tuple[str, IPv4Network | IPv6Network]:
    return each.interface, each.network


def _is_inward(each: InterfaceAddress) -> bool:
    return each.address.is_link_local or each.interface.startswith(_INWARD_INTERFACES)


def _means_another_elsewhere(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address means another host on each host, or behind each interface."""
    return address.is_loopback or (isinstance(address, IPv6Address) and address.is_link_local)


def own_addresses(*, must_be_clear: bool) -> tuple[str, ...]:
    """Addresses at which other hosts may reach this one, the best first; loopback if there is no other.

    Args:
        must_be_clear: Whether other hosts are to come.

    Raises:
        ClusterError: If they are, and several networks but no default route show where from.
    """
    routes = [address for other in _ELSEWHERE if not is_loopback(address := primary_address(other))]
    found = ranked(interface_addresses(), routes)
    if must_be_clear and not routes and len(found) > 1:
        raise ClusterError(
            f"this host has the addresses {', '.join(found)} and no default route, so that it is not clear "
            "by which of them other hosts reach it: name it with --advertise",
            param="--advertise",
        )
    return found or tuple(routes[:1]) or (LOOPBACK,)


def bind_address(address: str, others: Sequence[str]) -> str:
    """Addresses for servers of other hosts: a host's only address, or all of them.

    Args:
        address: Address of this host.
        others: Further ones of the same version of IP.
    """
    if not others:
        return address
    return "::" if ":" in address else "0.0.0.0"  # noqa: S104 - each peer comes by another address


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
        if not is_loopback(text) and any(map(is_loopback, resolved(text))):
            # As in /etc/hosts of Debian: servers would listen there, out of reach.
            raise ClusterError(
                f"--advertise {text} means {', '.join(resolved(text))} on this host, which others cannot "
                "reach: name an address, or correct /etc/hosts",
                param="--advertise",
            ) from None
        return text
    if address.is_unspecified:
        raise ClusterError(
            f"--advertise {text} means every address of this host, which other hosts cannot reach: name one",
            param="--advertise",
        )
    if isinstance(address, IPv6Address) and address.is_link_local:
        raise ClusterError(
            f"--advertise {text} is link-local: another host can use it only with the name of its "
            "interface behind it; name a global or a unique local address (fd00::/8)",
            param="--advertise",
        )
    return str(address)


def is_of_this_machine(*hosts: str) -> bool:
    """Whether all of some addresses are this machine's at this moment; names are none."""
    wanted = [parsed_ip(host) for host in hosts]
    own = {each.address for each in interface_addresses()}
    return all(address is not None and (address.is_loopback or address in own) for address in wanted)


class AddressWatch:
    """Tells when this host has lost an address. One that it never had is not lost.

    Args:
        host: The address, or a name for addresses that are all this host's.
        patience_s: Time for which an address may be away, as while a wireless network is lost.
        clock_s: Monotonic clock, seconds.
        is_own: Whether all of some addresses are this host's.
    """

    def __init__(
        self,
        host: str,
        patience_s: float,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        is_own: Callable[..., bool] = is_of_this_machine,
    ) -> None:
        self._addresses = resolved(host)
        self._patience_s = patience_s
        self._clock_s = clock_s
        self._is_own = is_own
        self._had_s: float | None = None

    @property
    def has_lost(self) -> bool:
        """Whether it had the address at an earlier look, and not at those of a while by now."""
        if self._is_own(*self._addresses):
            self._had_s = self._clock_s()
        return self._had_s is not None and self._clock_s() - self._had_s > self._patience_s


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
