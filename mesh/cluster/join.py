"""Joining a mesh: membership of this host, its Ray node, and rejoining with backoff."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from mesh.cluster.addresses import AddressWatch, primary_address, resolved
from mesh.cluster.discovery import discover_heads, with_found
from mesh.cluster.host_facts import read_host_facts
from mesh.cluster.join_token import decode
from mesh.cluster.members import Member, check_name
from mesh.cluster.membership_client import Membership, find_head
from mesh.cluster.port_plan import plan_ports
from mesh.cluster.ray_node import MOST_STARTS, RayNode, RayNodeConfig
from mesh.util.tasks import first_of
from spanmesh_proto.addresses import is_loopback, split_address
from spanmesh_proto.errors import ClusterError, HostUnreachable, InvalidJoinToken, JoinError, MeshError
from stages.cancellable_work import in_own_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mesh.cluster.host_facts import HostFacts
    from mesh.cluster.join_token import JoinToken
    from mesh.cluster.membership_server import RayAccess
    from mesh.cluster.port_plan import RayPorts
    from mesh.options.host import JoinOptions
    from mesh.util.tasks import Interruption

# Bound for moving layers to another host, which may take minutes.
_LEAVE_S: Final = 600.0
# Longer than it takes until the connection to the head counts as lost, if that is by the same address.
_ADDRESS_PATIENCE_S: Final = 5.0
_WATCH_S: Final = 1.0
_FIRST_S: Final = 0.5
# A try costs one connection only, so the host is back seconds after the head.
_MOST_S: Final = 2.0

log = structlog.get_logger()


class Node(Protocol):
    """The used part of a Ray node; see `RayNode`."""

    @property
    def is_running(self) -> bool:
        """Whether its first process runs."""

    async def wait_ready(self) -> str:
        """Wait until it is part of its cluster."""

    async def ended(self) -> None:
        """Return when its first process has ended."""

    def stop(self) -> None:
        """End every process of it."""


class LocalHost:
    """State of this host that outlives a membership.

    Args:
        options: Options of `mesh join`.
        start_node: Starts a Ray node.

    Attributes:
        rejoin_secret: Secret by which the head admits this host again; empty before it was admitted.
    """

    def __init__(self, options: JoinOptions, start_node: Callable[[RayNodeConfig], Node]) -> None:
        self._options = options
        self._start_node = start_node
        self.rejoin_secret = ""
        self._facts: HostFacts | None = None
        self._node: Node | None = None
        self._node_name = ""
        self._where: tuple[str, ...] = ()
        self._ports: RayPorts | None = None
        self._access: RayAccess | None = None

    async def member(self, head_address: str) -> Member:
        """This host as it reports itself.

        Free memory and free ports are read while no stage is loaded here, as a loaded one reduces them.

        Args:
            head_address: Address of the head that answered.

        Raises:
            PortInUse: If too few ports of this host's range are free.
        """
        options = self._options
        where = self._address(split_address(head_address)[0])
        if self._node is not None and where != self._where:
            # Its processes, and those of stages, listen and connect by the former address.
            log.info("address_is_another", was=self._where, now=where)
            self.close()
        self._where = where
        if self._node is None or not self._node.is_running or self._facts is None:
            self.close()
            self._ports = None if options.port_range is None else plan_ports(options.port_range)
            self._node_name = f"{options.name}.{secrets.token_hex(4)}"
            self._facts = await in_own_thread(
                read_host_facts,
                memory_bytes=options.memory_bytes,
                num_threads=options.threads,
                gpu_layers=options.gpu_layers,
                cpu_moe_layers=options.cpu_moe_layers,
            )
        return Member(
            name=options.name,
            address=options.advertise or where[0],
            facts=self._facts,
            ray_node_name=self._node_name,
            port_range=options.port_range,
            head_address=split_address(head_address)[0],
        )

    def _address(self, head: str) -> tuple[str, ...]:
        """IP addresses by which the others reach this host at this moment: a name may have several.

        Args:
            head: Address of the head, without its port.

        Raises:
            HostUnreachable: If no route leads to the head any more.
        """
        if self._options.advertise is not None:
            return resolved(self._options.advertise)
        address = primary_address(head)
        if is_loopback(address) and not any(map(is_loopback, resolved(head))):
            raise HostUnreachable(f"no route leads from this host to the head at {head} any more")
        return (address,)

    def node(self, member: Member, access: RayAccess) -> Node | None:
        """The Ray node for this cluster: the running one, or a new one.

        Args:
            member: This host as admitted.
            access: Address and token of the cluster.

        Returns:
            None if the running node belongs to another cluster: it is ended, and the host has to join again.
        """
        if self._node is not None and self._access != access:
            log.info("ray_is_another", was=self._access and self._access.address, now=access.address)
            self.close()
            return None
        if self._node is None:
            # In the main thread: the kernel ends the node with the thread that starts it.
            self._node = self._start_node(
                RayNodeConfig(
                    member.address,
                    member.ray_node_name,
                    access.token,
                    access.address,
                    identity=access.identity,
                    ports=self._ports,
                )
            )
            self._access = access
        return self._node

    def close(self) -> None:
        """End the node, and all processes on it."""
        if self._node is not None:
            self._node.stop()
            self._node = None


class MembershipSession:
    """One membership of this host, from joining to leaving.

    Args:
        token: Join token.
        local_host: This host.
        interruption: Signal handler that asks to leave.

    Attributes:
        was_admitted: Whether the head admitted this host.
        was_ready: Whether this host was a member with a running Ray node.
    """

    def __init__(self, token: JoinToken, local_host: LocalHost, interruption: Interruption) -> None:
        self._token = token
        self._local_host = local_host
        self._interruption = interruption
        self._wants_to_leave = asyncio.Event()
        self.was_admitted = False
        self.was_ready = False

    async def run(self) -> None:
        """Return when the head has released this host, or when it has asked to leave and the head is gone.

        Raises:
            JoinError: If the head refuses this host, or is gone.
            ClusterError: If this host's Ray node does not start, or ends.
        """
        head = await find_head(self._token)
        member = await self._local_host.member(head.address)
        local_host = self._local_host
        async with Membership(
            head, self._token.secret, member, rejoin_secret=local_host.rejoin_secret
        ) as membership:
            try:
                access = await membership.join()
            finally:
                # Also if this host was admitted and cannot do its part.
                local_host.rejoin_secret = membership.rejoin_secret
            self.was_admitted = True
            log.info(
                "joined",
                head=head.address,
                name=member.name,
                address=member.address,
                memory_bytes=member.facts.memory_bytes,
                threads=member.facts.num_threads,
                speed_gb_per_s=round(member.facts.speed_gb_per_s, 1),
            )
            self._interruption.soften(self._wants_to_leave.set)
            try:
                node = local_host.node(member, access)
                if node is None:
                    raise ClusterError("the head has a new Ray cluster")
                await first_of(
                    _listen(membership),
                    self._serve(membership, node),
                    self._leave(membership),
                    _watch_address(member.address),
                )
            except MeshError as error:
                if not self._wants_to_leave.is_set():
                    raise
                log.info("left_without_goodbye", reason=error.message)
            finally:
                self._interruption.soften(None)
                log.info("left", name=member.name)

    async def _serve(self, membership: Membership, node: Node) -> None:
        await node.wait_ready()
        await membership.report_ready()
        self.was_ready = True
        await node.ended()
        raise ClusterError("this host's Ray node ended")

    async def _leave(self, membership: Membership) -> None:
        await self._wants_to_leave.wait()
        log.info("leaving", wait="until its layers have moved; Ctrl-C again leaves at once")
        await membership.report_leaving()
        await asyncio.sleep(_LEAVE_S)
        log.warning("leaving_at_once", reason=f"the head has not released this host within {_LEAVE_S:g} s")


async def _listen(membership: Membership) -> None:
    async for state in membership.states():
        log.info("head_says", state=state)


async def _watch_address(address: str) -> None:
    watch = AddressWatch(address, _ADDRESS_PATIENCE_S)
    while not watch.has_lost:  # noqa: ASYNC110 - no event tells of it
        await asyncio.sleep(_WATCH_S)
    raise ClusterError(f"this host has no longer the address {address}")


def backoff_s(jitter: Callable[[], float]) -> Iterator[float]:
    """Pauses between tries, in seconds: each about twice as long as the one before, at most two seconds.

    Args:
        jitter: Random numbers from 0 to 1. Each pause is multiplied by a half to three halves.
    """
    pause_s = _FIRST_S
    while True:
        yield pause_s * (0.5 + jitter())
        pause_s = min(2 * pause_s, _MOST_S)


def may_pass(error: MeshError) -> bool:
    """Whether joining again may help after an error that ended a membership.

    A head that is away may come back; a head that still lists this host under its name will notice; a Ray
    node can be started again. A refused token or version stays refused.
    """
    return type(error) in {JoinError, HostUnreachable} or isinstance(error, ClusterError)


def _doubted(error: ClusterError | JoinError, token: JoinToken, now_s: float) -> ClusterError | JoinError:
    """An error of the first attempt to join, with a remark if the age of the token may be the reason."""
    doubt = token.doubt(now_s)
    is_explained = not isinstance(error, InvalidJoinToken | HostUnreachable) or "expired" in error.message
    return error if not doubt or is_explained else type(error)(f"{error.message}; {doubt}", param=error.param)


async def join_mesh(
    options: JoinOptions,
    interruption: Interruption,
    *,
    start_node: Callable[[RayNodeConfig], Node] = RayNode.start,
    jitter: Callable[[], float] = random.random,
    clock_s: Callable[[], float] = time.time,
) -> None:
    """Join, and stay a member until the head closes the mesh or releases this host.

    Any other end of a membership, such as a network failure, is waited out: the host joins again, with its
    Ray node if that still runs, and also if the token has expired meanwhile.

    Args:
        options: Options of `mesh join`.
        interruption: Its first signal asks the head to move the layers of this host; its second leaves at
            once.
        start_node: Starts this host's Ray node, in the main thread.
        jitter: Random numbers from 0 to 1, so that hosts that lost their head do not all come back at once.
        clock_s: Wall clock, Unix seconds.

    Raises:
        InvalidJoinToken: If the token is malformed or wrong, or had expired by the head's clock before this
            host was admitted; or if this host was evicted.
        HostUnreachable: If the head cannot be reached, from the start or for `give_up_after_s`, or cannot
            reach this host.
        JoinError: If the head refuses this host.
        ClusterError: If Ray fails to start in all attempts, or too few ports of the range are free.
    """
    token = given = decode(options.token)
    check_name(options.name)
    local_host = LocalHost(options, start_node)
    delays_s = backoff_s(jitter)
    heard_s: float | None = None
    num_false_starts = 0
    try:
        while True:
            if options.discover:
                # A head that was lost may have another address now; while the network is lost, none is found.
                with contextlib.nullcontext() if heard_s is None else contextlib.suppress(ClusterError):
                    token = with_found(given, await discover_heads())
            session = MembershipSession(token, local_host, interruption)
            try:
                await session.run()
            except (ClusterError, JoinError) as error:
                if session.was_ready:
                    heard_s, delays_s = time.monotonic(), backoff_s(jitter)
                num_false_starts += session.was_admitted and not session.was_ready
                is_known = heard_s is not None or 0 < num_false_starts < MOST_STARTS
                if not is_known or not may_pass(error):
                    raise error if local_host.rejoin_secret else _doubted(error, token, clock_s()) from None
                if heard_s is not None and time.monotonic() - heard_s > options.give_up_after_s:
                    log.warning("head_given_up", after_s=options.give_up_after_s)
                    raise
                delay_s = next(delays_s)
                log.warning("join_again", reason=error.message, in_s=round(delay_s, 1))
                await asyncio.sleep(delay_s)
            else:
                return
    finally:
        local_host.close()
