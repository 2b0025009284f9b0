"""Ranges of ports that are free on this machine."""

from mesh.cluster.addresses import free_port, is_free_everywhere
from mesh.cluster.port_plan import LEAST_PORTS
from spanmesh_proto.addresses import PortRange


def free_range(num_ports: int = LEAST_PORTS) -> PortRange:
    """A range of ports none of which anybody listens on now."""
    while True:
        # Those below it: the next ones are given to whoever asks for a free port next.
        above = free_port("127.0.0.1")
        found = PortRange(above - num_ports, above - 1)
        if all(map(is_free_everywhere, found.ports)):
            return found
