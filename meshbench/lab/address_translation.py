"""Address translation of the lab's router: hosts behind one address, as behind a router at home.

It translates as most of those do, in the terms of RFC 4787: an inside endpoint has one outside port for all
peers (endpoint-independent mapping), its own number if that is free. Packets from outside pass to it from an
endpoint that it has sent to only (address and port-dependent filtering), unless the port is forwarded.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshbench.lab.packets import TCP, UDP, Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshbench.lab.packets import Flow

# Time without packets after which a way in is closed. Many routers at home give UDP half a minute.
_IDLE_NS: Final = {TCP: 3_600 * 10**9, UDP: 30 * 10**9}
_FIRST_PORT: Final = 1024
_LAST_PORT: Final = 65535


@dataclass
class _Mapping:
    """Outside port of an inside endpoint."""

    inside: Endpoint
    """The endpoint."""
    port: int
    """Its outside port."""
    is_forwarded: bool = False
    """Whether anybody may send to it."""
    peers: dict[Endpoint, int] = field(default_factory=dict)
    """Time of the latest packet to or from each peer, monotonic nanoseconds."""


class AddressTranslation:
    """One network behind one address.

    Args:
        outside: Its address for others, 4 bytes.
        inside: Addresses of the hosts behind it.
    """

    def __init__(self, outside: bytes, inside: Iterable[bytes]) -> None:
        self.outside = outside
        self.inside = frozenset(inside)
        # By protocol and endpoint, and by protocol and outside port.
        self._by_inside: dict[tuple[int, Endpoint], _Mapping] = {}
        self._by_port: dict[tuple[int, int], _Mapping] = {}

    def forward(self, protocol: int, port: int, inside: Endpoint) -> None:
        """Forward an outside port to a host, for every sender.

        Args:
            protocol: `TCP` or `UDP`.
            port: The outside port.
            inside: Endpoint of the host.

        Raises:
            ValueError: If no such host is behind the address, or the port is in use.
        """
        if inside.address not in self.inside:
            raise ValueError(f"{ipaddress.ip_address(inside.address)} is not behind this address")
        if (protocol, port) in self._by_port:
            raise ValueError(f"outside port {port} is in use")
        self._forget(protocol, inside)
        self._keep(protocol, _Mapping(inside, port, is_forwarded=True))

    def outgoing(self, flow: Flow, now_ns: int) -> Endpoint:
        """The source that others see of a packet from inside; notes that its destination may answer.

        Args:
            flow: Endpoints of the packet.
            now_ns: Monotonic clock.

        Raises:
            ValueError: If all outside ports are in use.
        """
        mapping = self._by_inside.get((flow.protocol, flow.source))
        if mapping is not None and not self._is_alive(flow.protocol, mapping, now_ns):
            self._forget(flow.protocol, flow.source)
            mapping = None
        if mapping is None:
            mapping = _Mapping(flow.source, self._free_port(flow.protocol, flow.source.port, now_ns))
            self._keep(flow.protocol, mapping)
        mapping.peers[flow.destination] = now_ns
        return Endpoint(self.outside, mapping.port)

    def incoming(self, flow: Flow, now_ns: int) -> Endpoint | None:
        """The host to which a packet to the outside address belongs; None if it is not let in.

        Args:
            flow: Endpoints of the packet, its source as seen outside.
            now_ns: Monotonic clock.
        """
        mapping = self._by_port.get((flow.protocol, flow.destination.port))
        if mapping is None:
            return None
        heard_ns = mapping.peers.get(flow.source)
        is_known = heard_ns is not None and now_ns - heard_ns <= _IDLE_NS[flow.protocol]
        if not is_known and not mapping.is_forwarded:
            return None
        mapping.peers[flow.source] = now_ns
        return mapping.inside

    def _is_alive(self, protocol: int, mapping: _Mapping, now_ns: int) -> bool:
        latest_ns = max(mapping.peers.values(), default=now_ns)
        return mapping.is_forwarded or now_ns - latest_ns <= _IDLE_NS[protocol]

    def _free_port(self, protocol: int, wanted: int, now_ns: int) -> int:
        """The wanted port, or the next one that no living mapping has."""
        candidates: tuple[int, ...] = (wanted, *range(_FIRST_PORT, _LAST_PORT + 1))
        for port in candidates:
            mapping = self._by_port.get((protocol, port))
            if mapping is None:
                return port
            if not self._is_alive(protocol, mapping, now_ns):
                self._forget(protocol, mapping.inside)
                return port
        raise ValueError("all outside ports are in use")

    def _keep(self, protocol: int, mapping: _Mapping) -> None:
        self._by_inside[protocol, mapping.inside] = mapping
        self._by_port[protocol, mapping.port] = mapping

    def _forget(self, protocol: int, inside: Endpoint) -> None:
        mapping = self._by_inside.pop((protocol, inside), None)
        if mapping is not None:
            del self._by_port[protocol, mapping.port]
