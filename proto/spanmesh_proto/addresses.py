"""Network addresses: parsing and formatting of `host:port`."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from spanmesh_proto.errors import ClusterError

# Host names that every resolver accepts: dotted labels of 1 to 63 characters.
_NAME: Final = re.compile(r"(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}")
_PORT: Final = re.compile("[0-9]{1,5}")


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
