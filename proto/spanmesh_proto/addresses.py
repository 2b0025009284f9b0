"""Network addresses and port ranges: parsing and formatting of `host:port` and `20000-20099`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from spanmesh_proto.errors import ClusterError

# Host names that every resolver accepts: dotted labels of 1 to 63 characters.
_NAME: Final = re.compile(r"(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}")
_PORT: Final = re.compile("[0-9]{1,5}")
_RANGE: Final = re.compile("([0-9]{1,5})-([0-9]{1,5})")
# Lower ones need privileges on most systems, and Ray refuses them.
_LOWEST_PORT: Final = 1024
_HIGHEST_PORT: Final = 65535


@dataclass(frozen=True)
class PortRange:
    """TCP ports that a host may listen on.

    Raises:
        ClusterError: If they are no range, or some of them cannot be listened on without privileges.
    """

    first: int
    """First port."""
    last: int
    """Last port; it belongs to the range."""

    def __post_init__(self) -> None:
        if not _LOWEST_PORT <= self.first <= self.last <= _HIGHEST_PORT:
            raise ClusterError(
                f"--port-range {self} is no range of ports from {_LOWEST_PORT} to {_HIGHEST_PORT}, the lower "
                "one first: write it like 20000-20099",
                param="--port-range",
            )

    def __str__(self) -> str:
        """As it is written: `20000-20099`."""
        return f"{self.first}-{self.last}"

    def __len__(self) -> int:
        """Number of ports."""
        return self.last - self.first + 1

    @property
    def ports(self) -> range:
        """All ports, in ascending order."""
        return range(self.first, self.last + 1)


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port` or `[v6]:port` into host and port.

    Raises:
        ClusterError: If the address has neither form.
    """
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not _is_host(host) or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise ClusterError(f"{address!r} is not an address of the form host:port")
    return host, int(port)


def _is_host(text: str) -> bool:
    if ":" not in text:
        return _NAME.fullmatch(text) is not None
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def join_address(host: str, port: int) -> str:
    """Joins host and port as `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_port_range(text: str) -> PortRange:
    """Parses `20000-20099`.

    Raises:
        ClusterError: If it is something else.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise ClusterError(
            f"{text!r} is not a range of ports: write it like 20000-20099", param="--port-range"
        )
    return PortRange(int(found[1]), int(found[2]))


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine to itself only."""
    address = parsed_ip(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def parsed_ip(text: str) -> IPv4Address | IPv6Address | None:
    """An address; one of IPv4 in the form that sockets of both versions give it is one of IPv4."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
