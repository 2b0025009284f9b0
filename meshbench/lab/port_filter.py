"""Port filter of the lab's router: ports of a host that others may open connections to."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from meshbench.lab.packets import Flow

# More connections than a lab has at one time.
_MOST_FLOWS: Final = 65_536


class Verdict(Enum):
    """Treatment of a packet."""

    PASS = "pass"  # noqa: S105 - no password
    DROP = "drop"
    REJECT = "reject"


@dataclass(frozen=True)
class PortRules:
    """Rules for packets to one host."""

    allowed: tuple[tuple[int, int], ...]
    """First and last port of each range of TCP and UDP ports that others may send to."""
    rejects: bool = False
    """Whether senders of other packets are told; otherwise nothing answers them."""

    def allow(self, port: int) -> bool:
        """Whether others may send to a port."""
        return any(first <= port <= last for first, last in self.allowed)


class PortFilter:
    """Stateful filter by destination port: packets of a connection that was let in pass in both directions.

    Hosts without rules are open. Connections that were open before there was any rule are known once a packet
    to an allowed port passes.

    Args:
        most_flows: Number of connections that are remembered; the longest unused ones are forgotten.
    """

    def __init__(self, most_flows: int = _MOST_FLOWS) -> None:
        self._most_flows = most_flows
        self._rules: dict[bytes, PortRules] = {}
        # Those that were let in, by the packets in the direction of their first.
        self._flows: OrderedDict[Flow, None] = OrderedDict()

    @property
    def is_idle(self) -> bool:
        """Whether everything passes."""
        return not self._rules

    def set(self, host: bytes, rules: PortRules | None) -> None:
        """Replace the rules of a host; None opens it."""
        if rules is None:
            self._rules.pop(host, None)
        else:
            self._rules[host] = rules

    def verdict(self, flow: Flow) -> Verdict:
        """Treatment of a TCP or UDP packet."""
        for known in (flow, flow.answers):
            if known in self._flows:
                self._flows.move_to_end(known)
                return Verdict.PASS
        rules = self._rules.get(flow.destination.address)
        if rules is not None and not rules.allow(flow.destination.port):
            return Verdict.REJECT if rules.rejects else Verdict.DROP
        self._flows[flow] = None
        if len(self._flows) > self._most_flows:
            self._flows.popitem(last=False)
        return Verdict.PASS

    def lets_others_in(self, host: bytes) -> bool:
        """Whether packets that are neither TCP, UDP nor ICMP reach a host."""
        return host not in self._rules
