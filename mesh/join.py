"""What `mesh join` does: become a member, run a Ray node, stay until the mesh closes."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from mesh.cluster.addresses import primary_address, split_address
from mesh.cluster.host_facts import read_host_facts
from mesh.cluster.join_token import decode
from mesh.cluster.members import Member, check_name
from mesh.cluster.membership_client import Membership, find_head
from mesh.cluster.ray_node import RayNode, RayNodeConfig
from mesh.interruption import first_of
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from pathlib import Path

log = structlog.get_logger()


@dataclass(frozen=True)
class JoinOptions:
    """What the user says.

    Attributes:
        token: The join token's text.
        name: What to call this host.
        advertise: Address where the others reach it, or None for the one that leads to the head.
        memory_bytes: What the mesh may use, or None for all that is free.
        num_threads: Threads for computing, or None for one per core.
    """

    token: str
    name: str
    advertise: str | None
    memory_bytes: int | None
    num_threads: int | None


async def join_mesh(options: JoinOptions) -> None:
    """Join, and stay until the head closes the mesh.

    Raises:
        InvalidJoinToken: If the token is malformed, wrong or expired.
        HostUnreachable: If the head cannot be reached, cannot reach this host, or goes away.
        JoinError: If the head refuses this host.
        ClusterError: If Ray does not start, or ends.
    """
    token = decode(options.token)
    token.check_expiry(time.time())
    check_name(options.name)
    facts = asyncio.create_task(
        asyncio.to_thread(read_host_facts, memory_bytes=options.memory_bytes, num_threads=options.num_threads)
    )
    head = await find_head(token)
    member = Member(
        name=options.name,
        address=options.advertise or primary_address(split_address(head.address)[0]),
        facts=await facts,
        ray_node_name=f"{options.name}.{secrets.token_hex(4)}",
    )
    async with Membership(head, token.secret, member) as membership:
        ray = await membership.join()
        log.info(
            "joined",
            head=head.address,
            name=member.name,
            address=member.address,
            memory_bytes=member.facts.memory_bytes,
            threads=member.facts.num_threads,
            speed_gb_per_s=round(member.facts.speed_gb_per_s, 1),
        )
        # Here, in the main thread: the node dies with the thread that starts it.
        node = RayNode.start(RayNodeConfig(member.address, member.ray_node_name, ray.token, ray.address))
        try:
            await first_of(_listen(membership), _serve(membership, node))
        finally:
            node.stop()
            log.info("left", name=member.name)


async def _listen(membership: Membership) -> None:
    async for state in membership.states():
        log.info("head_says", state=state)


async def _serve(membership: Membership, node: RayNode) -> None:
    await node.wait_ready()
    await membership.report_ready()
    await node.ended()
    raise ClusterError("this host's Ray node ended; join again with the same `mesh join` line")


def read_token(path: Path) -> str:
    """The token in a file that `mesh serve --token-file` wrote.

    Raises:
        ClusterError: If it cannot be read.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ClusterError(f"cannot read the join token in {path}: {reason}", param="--token-file") from error
