"""Network of the lab: emulated hosts, delays and cuts."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final, Self

from mesh.util.child_environment import module_command
from meshbench.lab.host import Companion, Host
from meshbench.lab.link import LinkConditions
from meshbench.lab.router import Traffic
from meshbench.lab.tun import TUN_PATH
from spanmesh_proto.errors import ClusterError, MeshError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

# A packet costs the router some 20 to 40 µs of processor time whatever its size, so few and large ones:
# nearly the largest that IPv4 allows. The router's processor is then no bottleneck.
MTU_BYTES: Final = 65000
# Last number of the first address with an address translation behind it.
_FIRST_OUTSIDE: Final = 201
_TIMEOUT_S: Final = 60.0
_BRING_UP: Final = "link set lo up\nlink set mesh addrgenmode none\n"
_TOOLS = ("ip", "unshare", "nsenter", "mount")
_DISABLED = "/proc/sys/net/ipv6/conf/default/disable_ipv6"


class Lab:
    """Emulated hosts, each pair joined by a link with a one-way delay. A context manager.

    Everything ends with the context, also when this process is killed: see `meshbench.lab.namespace_init`.

    Args:
        num_hosts: Number of hosts; they are called `host0`, `host1`…, their addresses 10.77.0.1, 10.77.0.2…
        delay_ms: One-way delay between any two.
        shared: Directories under /tmp that all hosts share; the rest of /tmp is each host's own.
        is_ipv6: Whether links carry IPv6 instead, with addresses fd77::1, fd77::2…
        is_pinned: Whether each host has processors of its own, or shares one with few: see `host_processors`.
        seed: Of jitter and loss.
        networks: Hosts behind one address, as behind a router at home, for each such address; IPv4 only.
            Those of the first have addresses of 192.168.1.0/24, and appear as `outside_address(0)` to all
            others, who reach them with answers only, or through `forward`.
    """

    def __init__(
        self,
        num_hosts: int,
        delay_ms: float = 0.0,
        *,
        shared: Sequence[Path] = (),
        is_ipv6: bool = False,
        is_pinned: bool = False,
        seed: int = 1,
        networks: Sequence[Sequence[int]] = (),
    ) -> None:
        self.num_hosts = num_hosts
        self._networks = networks
        self._network_of = {host: index for index, hosts in enumerate(networks) for host in hosts}
        self._shared = shared
        self._conditions = LinkConditions(delay_ms)
        # Of links between two hosts that have their own.
        self._own_conditions: dict[tuple[int, int], LinkConditions] = {}
        available = sorted(os.sched_getaffinity(0)) if is_pinned else []
        self.processors = host_processors(available, num_hosts) if is_pinned else None
        self._seed = seed
        self._is_ipv6 = is_ipv6
        self._stack = ExitStack()
        self._hosts: list[Host] = []
        self._out_of_reach: set[int] = set()
        self._router: Companion

    def __enter__(self) -> Self:
        """Create hosts and links; raises MeshError if the system refuses."""
        with self._stack:
            self._stack.callback(self._hosts.clear)
            for index in range(self.num_hosts):
                processors = None if self.processors is None else self.processors[index]
                host = Host(f"host{index}", self._shared, processors)
                self._stack.callback(host.close)
                self._hosts.append(host)
            self._start_router()
            for index, host in enumerate(self._hosts):
                host.configure(["ip", "-batch", "-"], stdin=_BRING_UP + self._link_up(index))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every process of every host, and the router."""
        self._stack.close()

    def address(self, host: int) -> str:
        """IP address of a host, counted from 0, as it has it itself."""
        if host in self._network_of:
            return f"192.168.{self._network_of[host] + 1}.{host + 1}"
        return f"fd77::{host + 1:x}" if self._is_ipv6 else f"10.77.0.{host + 1}"

    def outside_address(self, network: int) -> str:
        """Address by which hosts behind an address translation appear to others; networks count from 0."""
        return f"10.77.0.{_FIRST_OUTSIDE + network}"

    def run(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process on a host; options as for `Host.run`."""
        return self._hosts[host].run(argv, **options)

    def exec(
        self,
        host: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a process on a host to its end, and capture its output.

        Raises:
            subprocess.TimeoutExpired: If it takes longer; it is killed then.
        """
        process = self.run(host, argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(list(argv), process.returncode, output.decode(), errors.decode())

    def set_delay_ms(self, delay_ms: float, *, between: tuple[int, int] | None = None) -> None:
        """Change the one-way delay, for packets sent from now on.

        Args:
            delay_ms: The delay.
            between: Two hosts, to change only their link; by default all links get the same delay.
        """
        if between is not None:
            known = self._own_conditions.get(_pair(between), self._conditions)
            self.set_link(replace(known, delay_ms=delay_ms), between=between)
            return
        own = self._own_conditions
        self.set_link(replace(self._conditions, delay_ms=delay_ms))
        for pair, conditions in own.items():
            if not conditions.is_ideal:
                self.set_link(replace(conditions, delay_ms=delay_ms), between=pair)

    def set_link(self, conditions: LinkConditions, *, between: tuple[int, int] | None = None) -> None:
        """Change all conditions of links, for packets sent from now on.

        Args:
            conditions: The conditions.
            between: Two hosts, to change only their link; by default all links get the same.
        """
        command: dict[str, Any] = {"link": asdict(conditions)}
        if between is None:
            self._conditions, self._own_conditions = conditions, {}
        else:
            self._own_conditions[_pair(between)] = conditions
            command["between"] = [self.address(host) for host in between]
        self._command(command)

    def filter_ports(
        self, host: int, ports: Sequence[tuple[int, int]] | None, *, rejects: bool = False
    ) -> None:
        """Let others open connections to some ports of a host only; what it opens itself is answered.

        Args:
            host: The host.
            ports: First and last port of each range, of TCP and UDP; None for all ports.
            rejects: Whether others are told that a port is closed; otherwise they hear nothing.
        """
        told = None if ports is None else [list(each) for each in ports]
        self._command({"filter": {"host": self.address(host), "ports": told, "rejects": rejects}})

    def forward(self, host: int, port: int, *, protocol: str = "tcp", host_port: int | None = None) -> None:
        """Forward a port of the outside address of a host's network to the host.

        Args:
            host: A host behind an address translation.
            port: Port of the outside address.
            protocol: `tcp` or `udp`.
            host_port: Port of the host, by default the same.
        """
        outside = self.outside_address(self._network_of[host])
        inside = {"host": self.address(host), "host_port": host_port or port}
        self._command({"forward": {"outside": outside, "protocol": protocol, "port": port, **inside}})

    def traffic(self) -> Traffic:
        """Counts of the router so far."""
        return self._command({})

    def pids(self, host: int) -> list[int]:
        """Process ids, in the outer namespace, of a host."""
        return self._hosts[host].pids()

    def kill(self, host: int) -> None:
        """End every process of a host at once, as by a power failure; others can be started after it."""
        self._hosts[host].signal_all(signal.SIGKILL)

    def freeze(self, host: int) -> None:
        """Stop every process of a host, as if it hung; its kernel still answers."""
        self._hosts[host].signal_all(signal.SIGSTOP)

    def thaw(self, host: int) -> None:
        """Continue a frozen host."""
        self._hosts[host].signal_all(signal.SIGCONT)

    def cut_off(self, host: int) -> None:
        """Take a host's link down."""
        self._hosts[host].configure(["ip", "link", "set", "mesh", "down"])

    def reconnect(self, host: int) -> None:
        """Bring the link of a host that was cut off up again."""
        self._hosts[host].configure(["ip", "-batch", "-"], stdin=self._link_up(host))

    def lose_packets(self, host: int) -> None:
        """Lose every packet from and to a host, as if a switch failed: its own link stays up."""
        self._set_out_of_reach(self._out_of_reach | {host})

    def deliver_packets(self, host: int) -> None:
        """End the loss of packets."""
        self._set_out_of_reach(self._out_of_reach - {host})

    def round_trip_ms(self, source: int, destination: int, *, num_samples: int = 30) -> float:
        """Median round trip between two hosts, answered by the destination's kernel."""
        done = self.exec(
            source, module_command("meshbench.lab.tcp_ping", self.address(destination), str(num_samples))
        )
        if done.returncode != 0:
            raise MeshError(f"no round trip from host{source} to host{destination}: {done.stderr.strip()}")
        samples: list[float] = json.loads(done.stdout)
        return statistics.median(samples)

    def _set_out_of_reach(self, hosts: set[int]) -> None:
        self._out_of_reach = hosts
        self._command({"out_of_reach": [self.address(host) for host in sorted(hosts)]})

    def _start_router(self) -> None:
        places = [f"{self.address(index)}={host.keeper_pid}" for index, host in enumerate(self._hosts)]
        networks = {
            self.outside_address(index): [self.address(host) for host in hosts]
            for index, hosts in enumerate(self._networks)
        }
        conditions = json.dumps({**asdict(self._conditions), "seed": self._seed, "networks": networks})
        program = module_command("meshbench.lab.router", conditions, *places)
        # In a network of its own, so that other programs never see its new devices.
        self._router = Companion(["unshare", "--net", *program], "the lab's router")
        self._stack.callback(self._router.wait)
        self._stack.callback(self._router.let_go)
        self._router.answer()

    def _link_up(self, host: int) -> str:
        """Lines for `ip -batch`: a link that goes down loses its route, and with IPv6 its address as well."""
        networks = ["fd77::/64" if self._is_ipv6 else "10.77.0.0/24"]
        if host in self._network_of:
            networks.append(f"192.168.{self._network_of[host] + 1}.0/24")
        # No other host can have the address: no waiting for duplicate detection.
        address = f"{self.address(host)}/64 nodad" if self._is_ipv6 else f"{self.address(host)}/24"
        return (
            f"link set mesh up mtu {MTU_BYTES} txqueuelen 1000\n"
            f"address replace {address} dev mesh\n"
            + "".join(f"route replace {network} dev mesh\n" for network in networks)
        )

    def _command(self, command: dict[str, Any]) -> Traffic:
        return Traffic(**json.loads(self._router.ask(json.dumps(command))))


def _pair(hosts: tuple[int, int]) -> tuple[int, int]:
    return min(hosts), max(hosts)


def host_processors(available: Sequence[int], num_hosts: int) -> list[tuple[int, ...]]:
    """Processors of each host, as even as can be: several of its own, or one that it shares with others.

    Args:
        available: Processor ids, not empty.
        num_hosts: Number of hosts.
    """
    if len(available) < num_hosts:
        return [(available[host % len(available)],) for host in range(num_hosts)]
    bounds = [host * len(available) // num_hosts for host in range(num_hosts + 1)]
    return [tuple(available[start:stop]) for start, stop in itertools.pairwise(bounds)]


def require_lab() -> None:
    """Check that a lab can be made here.

    Raises:
        ClusterError: If it cannot.
    """
    reason = lab_supported()
    if reason is not None:
        raise ClusterError(reason)


def lab_supported(*, is_ipv6: bool = False) -> str | None:
    """None if a lab can be made here, or else the reason in one line.

    Args:
        is_ipv6: Whether its wires are to carry IPv6.
    """
    if sys.platform != "linux":
        return f"a lab needs Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "a lab needs root, to make network namespaces"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"a lab needs {', '.join(missing)} (packages iproute2 and util-linux)"
    # In a namespace of its own, so that other programs never see the trial's device.
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", *module_command("meshbench.lab.tun")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if trial.returncode != 0:
        complaint = (trial.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"a lab needs namespaces and {TUN_PATH}: {complaint}"
    if is_ipv6:
        # A new network has the kernel's default, whatever this one's setting is.
        told = subprocess.run(
            ["unshare", "--net", "cat", _DISABLED], capture_output=True, text=True, check=False
        )
        if told.stdout.strip() != "0":
            return "a lab over IPv6 needs a kernel that has IPv6 on: boot without ipv6.disable=1"
    return None
