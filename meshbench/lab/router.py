"""Child process of the lab that forwards packets with delay, filters and translates them, and counts them.

Started by `Lab` in a network namespace of its own. Standard input carries one JSON object a line, each
answered by one line on standard output; end of file ends the process, and with it every device, so that a
killed lab leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from meshbench.lab.address_translation import AddressTranslation
from meshbench.lab.link import Link, LinkConditions
from meshbench.lab.middlebox import Middlebox
from meshbench.lab.packets import TCP, UDP, Endpoint
from meshbench.lab.port_filter import PortRules
from meshbench.lab.tun import open_tun

if TYPE_CHECKING:
    from collections.abc import Mapping

_BATCH_PACKETS: Final = 64
_READ_BYTES: Final = 65536
# Offset of a packet's source address, followed by its destination. By IP version.
_SOURCE_START: Final = {4: 12, 6: 8}
# First byte of IPv6 multicast addresses; IPv4's are not sent without subscribers.
_MULTICAST: Final = 0xFF
_PROTOCOLS: Final = {"tcp": TCP, "udp": UDP}
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Traffic:
    """Counts of the router."""

    num_packets: int
    """Packets delivered."""
    num_bytes: int
    """Their sizes, IP headers included."""
    num_dropped: int
    """Packets lost, dropped at a full link or by a filter, or without a destination host."""
    mean_late_us: float
    """Mean of how much later than due packets left, in microseconds."""
    max_late_us: float
    """Maximum of the same."""
    cpu_s: float
    """Processor time of the router, in seconds."""


class Router:
    """Forwards IP packets between TUN devices by destination address, each over its link.

    Args:
        devices: Descriptor of each host's device by address; all addresses are of one version.
        conditions: Conditions of all links at first.
        random: Source of jitter and loss.
        middlebox: Filters and translates packets.
    """

    def __init__(
        self, devices: Mapping[Address, int], conditions: LinkConditions, random: Random, middlebox: Middlebox
    ) -> None:
        (self._version,) = {address.version for address in devices}
        self._device_of = {address.packed: descriptor for address, descriptor in devices.items()}
        start = _SOURCE_START[self._version]
        size = len(next(iter(self._device_of)))
        self._destination = slice(start + size, start + 2 * size)
        self._pair = slice(start, start + 2 * size)
        self._middlebox = middlebox
        # By source and destination address.
        self._links = {
            source.packed + destination.packed: Link(conditions, random.random)
            for source in devices
            for destination in devices
        }
        # Those with packets in flight.
        self._busy: dict[bytes, Link] = {}
        # Packets from and to these addresses are lost.
        self._out_of_reach: set[bytes] = set()
        self._num_packets = self._num_bytes = self._num_unroutable = self._late_ns = self._max_late_ns = 0

    def run(self, control: int, answers: int) -> None:
        """Forward until end of file of `control`."""
        sources = [*self._device_of.values(), control]
        commands = b""
        while True:
            # select, unlike epoll, has a timeout in microseconds.
            readable, _, _ = select.select(sources, [], [], self._patience_s())
            for source in readable:
                if source != control:
                    self._receive(source)
                    continue
                chunk = os.read(control, _READ_BYTES)
                if not chunk:
                    return
                *lines, commands = (commands + chunk).split(b"\n")
                for line in lines:
                    os.write(answers, self._obey(json.loads(line)))
            self._deliver()

    def traffic(self) -> Traffic:
        """Counts so far."""
        return Traffic(
            num_packets=self._num_packets,
            num_bytes=self._num_bytes,
            num_dropped=self._num_unroutable + sum(link.num_dropped for link in self._links.values()),
            mean_late_us=self._late_ns / max(1, self._num_packets) / 1e3,
            max_late_us=self._max_late_ns / 1e3,
            cpu_s=time.process_time(),
        )

    def _patience_s(self) -> float | None:
        due = [link.next_due_ns for link in self._busy.values()]
        soonest_ns = min((due_ns for due_ns in due if due_ns is not None), default=None)
        return None if soonest_ns is None else max(0, soonest_ns - time.monotonic_ns()) / 1e9

    def _obey(self, command: dict[str, Any]) -> bytes:
        """Carry out a command: conditions of links, hosts whose packets are lost, ports that are open."""
        if "link" in command:
            conditions = LinkConditions(**command["link"])
            links = list(self._links.values())
            if "between" in command:
                a, b = (ipaddress.ip_address(address).packed for address in command["between"])
                links = [self._links[a + b], self._links[b + a]]
            for link in links:
                link.conditions = conditions
        if "out_of_reach" in command:
            self._out_of_reach = {ipaddress.ip_address(address).packed for address in command["out_of_reach"]}
        if "filter" in command:
            self._set_filter(**command["filter"])
        if "forward" in command:
            self._forward(**command["forward"])
        return json.dumps(asdict(self.traffic())).encode() + b"\n"

    def _set_filter(self, host: str, ports: list[tuple[int, int]] | None, *, rejects: bool) -> None:
        rules = None if ports is None else PortRules(tuple((first, last) for first, last in ports), rejects)
        self._middlebox.ports.set(ipaddress.ip_address(host).packed, rules)

    def _forward(self, outside: str, protocol: str, port: int, host: str, host_port: int) -> None:
        network = self._middlebox.network_at(ipaddress.ip_address(outside).packed)
        inside = Endpoint(ipaddress.ip_address(host).packed, host_port)
        network.forward(_PROTOCOLS[protocol], port, inside)

    def _receive(self, device: int) -> None:
        now_ns = time.monotonic_ns()
        for _ in range(_BATCH_PACKETS):
            try:
                packet = os.read(device, _READ_BYTES)
            except BlockingIOError:
                return
            if not self._is_between_hosts(packet):
                continue
            pair = packet[self._pair]
            if not self._middlebox.is_idle:
                passed = self._middlebox.passed(packet, now_ns)
                if passed is None:
                    self._num_unroutable += 1
                    continue
                packet, pair = passed.packet, passed.source + passed.destination
            if self._out_of_reach and self._is_lost(pair):
                self._num_unroutable += 1
                continue
            link = self._links.get(pair)
            if link is None:
                self._num_unroutable += 1
            elif link.push(packet, now_ns):
                self._busy[pair] = link

    def _is_between_hosts(self, packet: bytes) -> bool:
        """Whether it is of the hosts' version, and for one host: kernels report their IPv6 groups to all."""
        return packet[0] >> 4 == self._version and (
            self._version == 4 or packet[self._destination.start] != _MULTICAST
        )

    def _is_lost(self, pair: bytes) -> bool:
        """Whether the source or the destination is out of reach."""
        half = len(pair) // 2
        return pair[:half] in self._out_of_reach or pair[half:] in self._out_of_reach

    def _deliver(self) -> None:
        now_ns = time.monotonic_ns()
        due = [entry for link in self._busy.values() for entry in link.pop_due(now_ns)]
        if due:
            self._busy = {pair: link for pair, link in self._busy.items() if len(link)}
        for due_ns, packet in due:
            try:
                os.write(self._device_of[packet[self._destination]], packet)
            except OSError:  # the host is shutting down, or its kernel has no buffer
                self._num_unroutable += 1
                continue
            late_ns = now_ns - due_ns
            self._num_packets += 1
            self._num_bytes += len(packet)
            self._late_ns += late_ns
            self._max_late_ns = max(self._max_late_ns, late_ns)


def _be_punctual() -> None:
    """Raise the priority, to wake up in time though the hosts keep every core busy."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with contextlib.suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1", encoding="ascii")


def main(arguments: list[str]) -> None:
    """Run as a process: `CONDITIONS ADDRESS=PID...`, one process id in the namespaces of each host.

    The conditions of links are a JSON object, with the seed of what is random and, as `networks`, the hosts
    behind each translated address.

    The device that appears there is called `mesh` and is left down and without an address.
    """
    told, *hosts = arguments
    link = json.loads(told)
    random = Random(link.pop("seed"))  # noqa: S311 - no secret
    networks = [
        AddressTranslation(
            ipaddress.ip_address(outside).packed, [ipaddress.ip_address(each).packed for each in inside]
        )
        for outside, inside in link.pop("networks").items()
    ]
    devices: dict[Address, int] = {}
    for host in hosts:
        address, pid = host.split("=")
        descriptor = open_tun("mesh")
        subprocess.run(["ip", "link", "set", "mesh", "netns", pid], check=True)
        devices[ipaddress.ip_address(address)] = descriptor
    _be_punctual()
    router = Router(devices, LinkConditions(**link), random, Middlebox(networks))
    os.write(sys.stdout.fileno(), json.dumps(asdict(router.traffic())).encode() + b"\n")
    router.run(sys.stdin.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
