"""This host between two stays in a mesh: its facts, and its Ray node, which outlives a lost connection."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Protocol

import structlog

from mesh.cluster.addresses import primary_address
from mesh.cluster.host_facts import read_host_facts
from mesh.cluster.members import Member
from mesh.cluster.ray_node import RayNodeConfig
from spanmesh_proto.addresses import split_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.cluster.host_facts import HostFacts
    from mesh.cluster.membership_server import RayAccess
    from mesh.join import JoinOptions

log = structlog.get_logger()


class Node(Protocol):
    """What is needed of a Ray node; see `RayNode`."""

    @property
    def is_running(self) -> bool:
        """Whether its first process lives."""

    async def wait_ready(self) -> str:
        """Wait until it is part of its cluster."""

    async def ended(self) -> None:
        """Return when its first process has ended."""

    def stop(self) -> None:
        """End every process of it."""


class Home:
    """What stays when a stay ends.

    Args:
        options: What the user says.
        start_node: Starts a Ray node.
    """

    def __init__(self, options: JoinOptions, start_node: Callable[[RayNodeConfig], Node]) -> None:
        self._options = options
        self._start_node = start_node
        self._facts: HostFacts | None = None
        self._node: Node | None = None
        self._node_name = ""
        self._access: RayAccess | None = None

    async def member(self, head_address: str) -> Member:
        """This host as it introduces itself.

        Memory is read while no node of ours takes any: beside a loaded stage less of it is free.

        Args:
            head_address: Where the head was found.
        """
        options = self._options
        if self._node is None or not self._node.is_running or self._facts is None:
            self.close()
            self._node_name = f"{options.name}.{secrets.token_hex(4)}"
            self._facts = await asyncio.to_thread(
                read_host_facts,
                memory_bytes=options.memory_bytes,
                num_threads=options.num_threads,
                gpu_layers=options.gpu_layers,
            )
        return Member(
            name=options.name,
            address=options.advertise or primary_address(split_address(head_address)[0]),
            facts=self._facts,
            ray_node_name=self._node_name,
        )

    def node(self, member: Member, access: RayAccess) -> Node | None:
        """The node that belongs to this cluster: the one that runs, or a new one.

        Args:
            member: This host as it was admitted.
            access: Where the cluster is.

        Returns:
            None if the one that runs belongs to another cluster: it is ended, and the host is to join anew.
        """
        if self._node is not None and self._access != access:
            log.info("ray_is_another", was=self._access and self._access.address, now=access.address)
            self.close()
            return None
        if self._node is None:
            # Here, in the main thread: the node dies with the thread that starts it.
            self._node = self._start_node(
                RayNodeConfig(
                    member.address,
                    member.ray_node_name,
                    access.token,
                    access.address,
                    identity=access.identity,
                )
            )
            self._access = access
        return self._node

    def close(self) -> None:
        """End the node, and all that runs on it."""
        if self._node is not None:
            self._node.stop()
            self._node = None
