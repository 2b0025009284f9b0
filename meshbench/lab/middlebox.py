"""Middlebox of the lab's router: filter and address translation, and the way of each packet through both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshbench.lab.packets import Flow, addresses_of, flow_of, is_icmp, refusal_of, with_endpoints
from meshbench.lab.port_filter import PortFilter, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshbench.lab.address_translation import AddressTranslation


@dataclass(frozen=True)
class Passed:
    """A packet on its way to a host."""

    packet: bytes
    """The packet as it is delivered."""
    source: bytes
    """Address of the host from whose side it comes, as that host has it itself."""
    destination: bytes
    """Address of the host that gets it, likewise."""


class Middlebox:
    """Decides about each packet between two hosts.

    Translated networks carry TCP and UDP over IPv4 only: ICMP into and out of them is dropped.

    Args:
        networks: Networks behind one address each.

    Attributes:
        ports: Filter by destination port.
    """

    def __init__(self, networks: Sequence[AddressTranslation] = ()) -> None:
        self.ports = PortFilter()
        self._by_inside = {address: network for network in networks for address in network.inside}
        self._by_outside = {network.outside: network for network in networks}

    @property
    def is_idle(self) -> bool:
        """Whether every packet passes as it is."""
        return self.ports.is_idle and not self._by_outside

    def network_at(self, outside: bytes) -> AddressTranslation:
        """The network behind an address.

        Raises:
            KeyError: If there is none.
        """
        return self._by_outside[outside]

    def passed(self, packet: bytes, now_ns: int) -> Passed | None:
        """The packet that is delivered for one that a host sent.

        Args:
            packet: The packet as sent.
            now_ns: Monotonic clock.

        Returns:
            The packet with its translated endpoints, or the refusal to its sender; None if it is dropped.
        """
        flow = flow_of(packet)
        if flow is None:
            return self._without_ports(packet)
        translated = self._translated(flow, now_ns)
        if translated is None:
            return None
        # The filter knows a connection by the endpoints that its hosts have themselves.
        verdict = self.ports.verdict(Flow(flow.protocol, flow.source, translated.destination))
        source, destination = flow.source.address, translated.destination.address
        if verdict is Verdict.DROP:
            return None
        if verdict is Verdict.REJECT:
            refusal = refusal_of(packet)
            return None if refusal is None else Passed(refusal, destination, source)
        if translated != flow:
            packet = with_endpoints(packet, translated.source, translated.destination)
        return Passed(packet, source, destination)

    def _translated(self, flow: Flow, now_ns: int) -> Flow | None:
        """The flow as its receiver sees it; None if there is no way."""
        source, destination = flow.source, flow.destination
        network = self._by_inside.get(source.address)
        behind = self._by_inside.get(destination.address)
        if behind is not None:
            # An inside address means nothing to others.
            return flow if behind is network else None
        if network is not None:
            source = network.outgoing(flow, now_ns)
        there = self._by_outside.get(destination.address)
        if there is not None:
            found = there.incoming(Flow(flow.protocol, source, destination), now_ns)
            if found is None:
                return None
            destination = found
        return Flow(flow.protocol, source, destination)

    def _without_ports(self, packet: bytes) -> Passed | None:
        source, destination = addresses_of(packet)
        if destination in self._by_outside or self._by_inside.get(source) is not self._by_inside.get(
            destination
        ):
            return None
        if not is_icmp(packet) and not self.ports.lets_others_in(destination):
            return None
        return Passed(packet, source, destination)
