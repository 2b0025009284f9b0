"""Ports of a host: division of its range among Ray and spanmesh, and whether other hosts reach them.

Ray's part comes first. Both parts follow from the range alone: Ray's processes and ours never try the same
port, and a head that takes over the stages of a former one divides the range like that one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mesh.cluster.addresses import is_free_everywhere
from spanmesh_proto.addresses import join_address, split_address
from spanmesh_proto.errors import ClusterError, HostUnreachable, JoinError, PortInUse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from spanmesh_proto.addresses import PortRange

# The control service of the head, node manager, object manager; and four of agents, where those run.
_RAY_SERVICES: Final = 7
# Worker processes that are no stages: the head's driver, one that Ray keeps warm, two that inspect the host.
_OTHER_WORKERS: Final = 4
# The service for joining hosts on the head, and the link probes.
_OWN_SERVERS: Final = 2
# Of one host at one time: a stage, a replica, and those that load while others are not gone yet.
_LEAST_STAGES: Final = 4
# Twice what four stages need: Ray uses a port again only a minute after the process that had it has ended.
LEAST_PORTS: Final = 32
# More are never used at one time, and Ray is given them one by one.
_MOST_WORKERS: Final = 256
# Ports that a reachability check tries: the ends of the range, and some in between.
_NUM_CHECKED: Final = 8
NONCE_BYTES: Final = 16


@dataclass(frozen=True)
class RayPorts:
    """Ports of a Ray node."""

    control: int
    """The cluster's control service (GCS); unused unless the node is the head."""
    node_manager: int
    """Node manager."""
    object_manager: int
    """Object manager."""
    agents: tuple[int, int, int, int]
    """Metrics agent, metrics export, dashboard agent and runtime-environment agent. Free where these agents
    are left out, see `mesh.cluster.ray_start_hook`."""
    workers: tuple[int, ...]
    """One for each worker process and for the head's driver."""


class CheckListener:
    """On the host to be reached: sends its nonce to each connection, until closed."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._servers: list[asyncio.Server] = []

    async def open(self, address: str, port_range: PortRange | None = None) -> tuple[int, ...]:
        """Listen at an address of this host.

        Args:
            address: The address.
            port_range: Ports that this host may listen on. Some of them are taken, from end to end, but none
                on which other processes listen. None for any one free port.

        Returns:
            The ports, at least one.

        Raises:
            JoinError: If it is no address of this host, or none of the ports is free.
        """
        for port in (0,) if port_range is None else checked_ports(port_range):
            try:
                self._servers.append(await asyncio.start_server(self._answer, address, port))
            except OSError as error:
                if port and error.errno == errno.EADDRINUSE:
                    continue
                raise JoinError(
                    f"cannot listen on {address}: {error.strerror or error}; --advertise must be an address "
                    "of this host"
                ) from error
        if not self._servers:
            raise JoinError(
                f"other processes listen on the ports of --port-range {port_range}: end them, or name "
                "another range",
                param="--port-range",
            )
        return tuple(int(server.sockets[0].getsockname()[1]) for server in self._servers)

    async def close(self) -> None:
        """Stop listening."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        for server in servers:
            await server.wait_closed()

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self.nonce)
        writer.close()


class RangeListener:
    """A `CheckListener` for several peers at a time, open while one of them checks.

    Args:
        address: Address of this host.
        port_range: Ports that this host may listen on.
    """

    def __init__(self, address: str, port_range: PortRange) -> None:
        self._address = address
        self.port_range = port_range
        self._turn = asyncio.Lock()
        self._listener = CheckListener()
        self._ports: tuple[int, ...] = ()
        self._num_peers = 0

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[tuple[int, ...], bytes]]:
        """Context in which this host listens: yields the ports and the nonce.

        Raises:
            JoinError: If none of the ports is free.
        """
        async with self._turn:
            if not self._num_peers:
                self._ports = await self._listener.open(self._address, self.port_range)
            self._num_peers += 1
        try:
            yield self._ports, self._listener.nonce
        finally:
            self._num_peers -= 1
            if not self._num_peers:
                await self._listener.close()


def check_size(port_range: PortRange) -> None:
    """Check that a range is large enough for a host.

    Raises:
        ClusterError: With the number of ports that are needed.
    """
    if len(port_range) < LEAST_PORTS:
        raise ClusterError(
            f"--port-range {port_range} has {len(port_range)} ports, and a host needs {LEAST_PORTS}: "
            f"{_RAY_SERVICES} for Ray's services, {_OTHER_WORKERS} for its workers, {_OWN_SERVERS} for "
            "joining hosts and link probes, two for each stage or replica, and some that were used a moment "
            "ago; 100 leave room for several models",
            param="--port-range",
        )


def ray_part(port_range: PortRange) -> range:
    """Ports of Ray's processes: half of the range, and what Ray needs beyond one port for each stage."""
    return port_range.ports[: len(port_range) - len(own_part(port_range))]


def own_part(port_range: PortRange) -> range:
    """Ports of spanmesh's own servers: joining hosts, link probes, and one for each stage."""
    size = (len(port_range) + _OWN_SERVERS - _RAY_SERVICES - _OTHER_WORKERS) // 2
    return port_range.ports[len(port_range) - size :]


def own_ports(port_range: PortRange | None) -> Sequence[int]:
    """Ports for `stages.transport.channels.listen_within`; empty, for any free port, without a range."""
    return () if port_range is None else own_part(port_range)


def plan_ports(port_range: PortRange, is_free: Callable[[int], bool] = is_free_everywhere) -> RayPorts:
    """Ports of a Ray node that is about to start.

    Args:
        port_range: Ports that the host may listen on.
        is_free: Whether no process listens on a port.

    Raises:
        ClusterError: If the range is too small.
        PortInUse: If other processes hold so many of them that too few are left, for Ray or for the rest.
    """
    check_size(port_range)
    enough = _RAY_SERVICES + _MOST_WORKERS
    free = _free(
        port_range, ray_part(port_range), _RAY_SERVICES + _OTHER_WORKERS + _LEAST_STAGES, enough, is_free
    )
    least_own = _OWN_SERVERS + _LEAST_STAGES
    _free(port_range, own_part(port_range), least_own, least_own, is_free)
    control, node_manager, object_manager, a, b, c, d, *workers = free
    return RayPorts(control, node_manager, object_manager, (a, b, c, d), tuple(workers))


def _free(
    port_range: PortRange, part: range, needed: int, enough: int, is_free: Callable[[int], bool]
) -> list[int]:
    """The first free ports of a part, up to as many as are enough.

    Raises:
        PortInUse: If there are fewer than needed.
    """
    free: list[int] = []
    taken: list[int] = []
    for port in part:
        (free if is_free(port) else taken).append(port)
        if len(free) == enough:
            break
    if len(free) < needed:
        raise PortInUse(
            f"--port-range {port_range}: other processes listen on {_shown(taken)}, so that of "
            f"{part[0]}-{part[-1]} {len(free)} ports are free and {needed} are needed: end those processes, "
            "or name another range, or a wider one",
            param="--port-range",
        )
    return free


def _shown(ports: Sequence[int]) -> str:
    """Ports as text: `20000-20003, 20007`."""
    runs: list[list[int]] = []
    for port in ports:
        if runs and port == runs[-1][-1] + 1:
            runs[-1][1:] = [port]
        else:
            runs.append([port])
    return ", ".join("-".join(map(str, run)) for run in runs)


def checked_ports(port_range: PortRange) -> list[int]:
    """Ports by which a reachability check judges a range: its ends, and some in between."""
    last = len(port_range) - 1
    num_ports = min(_NUM_CHECKED, len(port_range))
    return [port_range.ports[round(index * last / max(1, num_ports - 1))] for index in range(num_ports)]


async def unreachable_ports(
    address: str, ports: Sequence[int], nonce: bytes, *, timeout_s: float
) -> dict[int, str]:
    """Ports of a host that cannot be reached from here, all tried at the same time.

    Args:
        address: Address that the host advertises.
        ports: Ports of its `CheckListener`.
        nonce: Expected answer, so that another machine at the address is detected.
        timeout_s: For the whole check.

    Returns:
        The reason by port, in the order of the ports; empty if all can be reached.
    """
    reasons = await asyncio.gather(*(_try(address, port, nonce, timeout_s) for port in ports))
    return {port: reason for port, reason in zip(ports, reasons, strict=True) if reason}


async def _try(address: str, port: int, nonce: bytes, timeout_s: float) -> str:
    """The reason why a port cannot be reached; empty if it can."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                answer = await reader.read(NONCE_BYTES)
            finally:
                writer.transport.abort()
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
    except OverflowError:
        return "there is no such port"
    if len(nonce) == NONCE_BYTES and hmac.compare_digest(answer, nonce):
        return ""
    return "another machine answers"


async def check_reachable_back(
    address: str, ports: Sequence[int], nonce: bytes, *, port_range: PortRange | None = None, timeout_s: float
) -> None:
    """At the head: connect to the joining host at its advertised address.

    Args:
        address: Address that the host advertises.
        ports: Ports of its `CheckListener`, at least one.
        nonce: Expected answer.
        port_range: Ports that the host may listen on; None for any.
        timeout_s: For the whole check.

    Raises:
        HostUnreachable: Naming the address and the ports that were tried.
    """
    reasons = await unreachable_ports(address, ports, nonce, timeout_s=timeout_s)
    if reasons:
        raise HostUnreachable(_not_back(address, ports, reasons, port_range))


def _not_back(
    address: str, ports: Sequence[int], reasons: Mapping[int, str], port_range: PortRange | None
) -> str:
    port, reason = next(iter(reasons.items()))
    start = f"the head cannot reach this host back at {join_address(address, port)}: {reason}; "
    if port_range is None:
        return start + (
            "advertise an address that the head can reach with --advertise, and let it through the firewall; "
            "where only some ports are let through, name them with --port-range"
        )
    closed = ", ".join(map(str, reasons))
    if len(reasons) < len(ports):
        reached = ", ".join(str(port) for port in ports if port not in reasons)
        found = f"of --port-range {port_range} it reached {reached} and not {closed}"
    else:
        found = f"of --port-range {port_range} it tried {closed}"
    return start + (
        f"{found}: let all TCP to {port_range} through the firewall of {address}, or name the ports that it "
        "lets through, with --port-range, or an address that the head can reach, with --advertise"
    )


async def check_ray_reachable(ray_address: str, port_range: PortRange, *, timeout_s: float) -> None:
    """On the joining host: connect to Ray's control service on the head, before Ray tries it for minutes.

    Args:
        ray_address: `host:port` of the control service.
        port_range: Ports that the head may listen on.
        timeout_s: Longest wait.

    Raises:
        HostUnreachable: Naming the port, and the ports that have to be open.
    """
    host, port = split_address(ray_address)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
        writer.transport.abort()
    except TimeoutError:
        reason = f"no answer within {timeout_s:g} s"
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        return
    raise HostUnreachable(
        f"this host cannot reach Ray of the head at {ray_address}: {reason}; let TCP to {port_range}, which "
        f"are the head's --port-range, through the firewall of {host}"
    )
