"""What `mesh join` does: become a member, and stay one until the mesh closes."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from mesh.backoff import backoff_s, may_pass
from mesh.cluster.join_token import decode
from mesh.cluster.members import check_name
from mesh.cluster.ray_node import MOST_STARTS, RayNode
from mesh.home import Home
from mesh.stay import Stay
from spanmesh_proto.errors import ClusterError, JoinError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.cluster.ray_node import RayNodeConfig
    from mesh.home import Node
    from mesh.util.tasks import Interruption

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
        give_up_after_s: How long to look for a head that was there once.
        gpu_layers: Of each stage on this host's GPUs; None for as many as find room, see
            `mesh.placement.host_capacity`.
    """

    token: str = field(repr=False)
    name: str
    advertise: str | None
    memory_bytes: int | None
    num_threads: int | None
    give_up_after_s: float = 600.0
    gpu_layers: int | None = None


async def join_mesh(
    options: JoinOptions,
    interruption: Interruption,
    *,
    start_node: Callable[[RayNodeConfig], Node] = RayNode.start,
    jitter: Callable[[], float] = random.random,
) -> None:
    """Join, and stay until the head closes the mesh or lets this host go.

    Whatever ends a stay before that, such as a network that is away for a while, is waited out: the host
    joins again, with the Ray node that it has if that still runs.

    Args:
        options: What the user says.
        interruption: Its first signal asks the head to move what is here; its second leaves at once.
        start_node: Starts this host's Ray node, in the main thread.
        jitter: From 0 to 1, so that hosts that lost their head do not all come back at the same instant.

    Raises:
        InvalidJoinToken: If the token is malformed, wrong or expired, or this host was evicted.
        HostUnreachable: If the head cannot be reached, from the start or for `give_up_after_s`, or cannot
            reach this host.
        JoinError: If the head refuses this host.
        ClusterError: If Ray does not start, however often it is tried.
    """
    token = decode(options.token)
    check_name(options.name)
    home = Home(options, start_node)
    delays_s = backoff_s(jitter)
    heard_s: float | None = None
    num_false_starts = 0
    try:
        while True:
            token.check_expiry(time.time())
            stay = Stay(token, home, interruption)
            try:
                await stay.run()
            except (ClusterError, JoinError) as error:
                if stay.was_ready:
                    heard_s, delays_s = time.monotonic(), backoff_s(jitter)
                num_false_starts += stay.was_admitted and not stay.was_ready
                is_known = heard_s is not None or 0 < num_false_starts < MOST_STARTS
                if not is_known or not may_pass(error):
                    raise
                if heard_s is not None and time.monotonic() - heard_s > options.give_up_after_s:
                    log.warning("head_given_up", after_s=options.give_up_after_s)
                    raise
                delay_s = next(delays_s)
                log.warning("join_again", reason=error.message, in_s=round(delay_s, 1))
                await asyncio.sleep(delay_s)
            else:
                return
    finally:
        home.close()
