"""Port plan: division of a host's port range among Ray's processes and spanmesh's own servers.

Ray's part comes first. Both parts follow from the range alone: Ray's processes and ours never try the same
port, and a head that takes over the stages of a former one divides the range like that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mesh.cluster.addresses import is_free_everywhere
from spanmesh_proto.errors import ClusterError, PortInUse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
