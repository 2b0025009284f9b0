"""Head: its Ray node, membership service and token file."""

from __future__ import annotations

import contextlib
import secrets
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from mesh.cluster.addresses import bind_address
from mesh.cluster.certificates import Authority
from mesh.cluster.join_token import encode
from mesh.cluster.link_probe import EchoServer, LinkSurvey
from mesh.cluster.members import Member, Members
from mesh.cluster.membership_server import MembershipServer, MembershipService, RayAccess
from mesh.cluster.port_plan import own_ports, plan_ports
from mesh.cluster.ray_driver import RayDriver
from mesh.cluster.ray_node import MOST_STARTS, RayNode, RayNodeConfig, new_ray_token
from spanmesh_proto.addresses import is_loopback, join_address
from spanmesh_proto.errors import ClusterError
from stages.files import write_private_file
from stages.weights.fetch import FetchSource, RateLimit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from mesh.cluster.certificates import Certificate
    from mesh.cluster.host_facts import HostFacts
    from mesh.options.host import HeadOptions
    from mesh.serve.head_identity import HeadIdentity
    from mesh.serve.head_state import HeadState
    from mesh.util.tasks import Interruption
    from stages.transport.channels import Identity
    from stages.weights.virtual_stages import StageCache

log = structlog.get_logger()


@dataclass(frozen=True)
class Head:
    """Parts of an open head."""

    driver: RayDriver
    """Starts actors."""
    own: Member
    """Member of this host."""
    members: Members
    """Hosts; this one among them unless it holds no layers."""
    service: MembershipService
    """Membership service for the hosts."""
    node: RayNode
    """Ray node of this host."""
    survey: LinkSurvey
    """Measures the links between hosts."""
    authority: Authority
    """Signs the certificates of stages and hosts."""
    certificate: Certificate
    """Certificate of the authority."""
    write_token: Callable[[str], None]
    """Writes the join token to the file that the operator named."""
    former: HeadState | None
    """State left by a head that crashed, if its Ray node could be adopted."""

    @property
    def token(self) -> str:
        """The current join token, as text."""
        return encode(self.service.token)

    def is_own(self, member: Member) -> bool:
        """Whether a member is this host."""
        return member.ray_node_name == self.own.ray_node_name

    def source_for(self, member: Member) -> FetchSource:
        """Address from which a host fetches stage files, with the current credentials."""
        service = self.service
        return FetchSource(service.reached_by(member), self.authority.certificate_pem, service.fetch_secret)


@contextmanager
def token_file(path: Path | None, text: str) -> Iterator[Callable[[str], None]]:
    """Context in which `path` holds `text`, readable by this user only; afterwards the file is removed.

    The block is given a function that replaces the text.

    A reader sees the whole token or no file. A token that another mesh wrote there meanwhile is kept.

    Args:
        path: Path of the file, or None for no file.
        text: The token.

    Raises:
        ClusterError: If the file cannot be written.
    """
    current = text

    def write(new_text: str) -> None:
        nonlocal current
        if path is None:
            return
        current = new_text
        try:
            write_private_file(path, f"{new_text}\n")
        except OSError as error:
            raise ClusterError(
                f"cannot write the join token to {path}: {error.strerror}", param="--token-file"
            ) from error

    write(text)
    try:
        yield write
    finally:
        with contextlib.suppress(OSError):
            if path is not None and path.read_text().strip() == current:
                path.unlink()


@asynccontextmanager
async def open_head(
    options: HeadOptions,
    facts: HostFacts,
    cache: StageCache,
    interruption: Interruption,
    *,
    identity: HeadIdentity,
    former: HeadState | None = None,
) -> AsyncIterator[Head]:
    """Context in which Ray and the membership service run; afterwards every host has been released.

    Args:
        options: Options of `mesh serve`.
        facts: Facts of this host.
        cache: Stage files that are sent to hosts.
        interruption: Armed again after Ray has installed its signal handlers.
        identity: Certificate, join token and admitted hosts.
        former: State left by a head that crashed. If it had the same certificate, hosts find this head at its
            port, and its Ray node is adopted if it still runs.

    Raises:
        ClusterError: If Ray does not start.
        PortInUse: If the membership service cannot listen, or too few ports of this host's range are free.
    """
    certificate = identity.certificate
    authority = Authority(certificate)
    ray_identity = authority.own_identity([options.name], options.address, *options.other_addresses)
    adopted = _adopted(former, identity, options)
    async with _ray_node(options, adopted, ray_identity) as (node, ray_address):
        ray = RayAccess(ray_address, node.token_path.read_text(), ray_identity if node.is_encrypted else None)
        own = Member(
            name=options.name,
            address=options.address,
            facts=facts,
            ray_node_name=node.record.name,
            is_ready=True,
            port_range=options.port_range,
            other_addresses=options.other_addresses,
        )
        with _ray_driver(node, ray.address, interruption, are_kept=options.linger_s > 0) as driver:
            members = Members()
            if not options.head_only:
                members.admit(own)
            service = MembershipService(
                admissions=identity.admissions,
                ray=ray,
                members=members,
                cache=cache,
                versions=facts.versions,
                authority=authority,
                rate=RateLimit(options.transfer_rate),
                port_range=options.port_range,
                token_lifetime_s=options.token_hours * 3600,
            )
            async with (
                _served(service, certificate, options, _join_port(options, identity, former)),
                _survey(own, members, service, authority) as survey,
            ):
                with token_file(options.token_path, encode(service.token)) as write_token:
                    yield Head(
                        driver,
                        own,
                        members,
                        service,
                        node,
                        survey,
                        authority,
                        certificate,
                        write_token,
                        former if node is adopted else None,
                    )


@asynccontextmanager
async def _survey(
    own: Member, members: Members, service: MembershipService, authority: Authority
) -> AsyncIterator[LinkSurvey]:
    """Context in which this host answers link probes and can probe the others."""
    # The second name is used for this host in the survey if another host has the first.
    identity = authority.own_identity([own.name, f"{own.name} (head)"], own.address)
    secret = service.link_secret
    echo = EchoServer(secret, lambda: identity)
    try:
        port = await echo.start(own.bind_address, own.port_range)
        yield LinkSurvey(replace(own, echo_port=port), members, service, secret, identity)
    finally:
        await echo.stop()


@asynccontextmanager
async def _ray_node(
    options: HeadOptions, node: RayNode | None, identity: Identity
) -> AsyncIterator[tuple[RayNode, str]]:
    """A ready node, the given one or a new one, and the address of its cluster."""
    for starts_left in reversed(range(MOST_STARTS)):
        node = node or _start(options, identity)
        try:
            address = await node.wait_ready()
        except BaseException as error:
            node.stop()
            if not isinstance(error, ClusterError) or not starts_left:
                raise
            log.warning("ray_starts_again", reason=error.message)
            node = None
        else:
            break
    assert node is not None  # noqa: S101 - the last try raised, or it is
    try:
        yield node, address
    finally:
        node.stop()


def _start(options: HeadOptions, identity: Identity) -> RayNode:
    return RayNode.start(
        RayNodeConfig(
            options.address,
            f"{options.name}.{secrets.token_hex(4)}",
            new_ray_token(),
            linger_s=options.linger_s,
            # Ray takes 127.0.0.1 for another address of this machine, which no certificate of the mesh names;
            # and traffic that never leaves the machine need not be encrypted.
            identity=None if is_loopback(options.address) else identity,
            ports=None if options.port_range is None else plan_ports(options.port_range),
        )
    )


def _adopted(former: HeadState | None, identity: HeadIdentity, options: HeadOptions) -> RayNode | None:
    """The Ray node of a former head of the same mesh, if it still runs at an address of this host.

    Any other is ended.
    """
    if former is None:
        return None
    try:
        node = RayNode.adopt(former.ray)
    except ClusterError as error:
        log.info("begins_anew", reason=error.message)
        return None
    addresses = (options.address, *options.other_addresses)
    if former.ray.address not in addresses:
        # Its processes connect to one another by that address.
        reason = f"this host was {former.ray.address} and is {options.address} now"
        log.info("begins_anew", reason=reason)
        node.stop()
        return None
    if not identity.is_of(former.certificate_pem):
        # Its processes, and the hosts that joined it, trust another authority.
        log.info("begins_anew", reason="--identity names another mesh than the one that crashed here")
        node.stop()
        return None
    log.info("ray_adopted", node=former.ray.name)
    return node


@contextmanager
def _ray_driver(
    node: RayNode, address: str, interruption: Interruption, *, are_kept: bool
) -> Iterator[RayDriver]:
    driver = RayDriver(node, address, are_kept=are_kept)
    interruption.arm()
    try:
        yield driver
    finally:
        driver.close()


def _join_port(options: HeadOptions, identity: HeadIdentity, former: HeadState | None) -> int:
    """Port of the membership service, 0 for any: that of the token, unless the operator names another."""
    if former is not None and identity.is_of(former.certificate_pem):
        return former.join_port
    allowed = own_ports(options.port_range)
    if options.join_port or (allowed and identity.join_port not in allowed):
        return options.join_port
    return identity.join_port


@asynccontextmanager
async def _served(
    service: MembershipService, certificate: Certificate, options: HeadOptions, port: int
) -> AsyncIterator[None]:
    server = MembershipServer(service, certificate)
    try:
        # Ctrl-C may come when the server listens already.
        where = bind_address(options.address, options.other_addresses)
        port = await server.start(where, port, own_ports(options.port_range))
        addresses = [join_address(each, port) for each in (options.address, *options.other_addresses)]
        service.listens_at(*addresses)
        hours = (service.token.expires_at_s - time.time()) / 3600
        log.info("membership_open", addresses=addresses, token_hours=round(hours, 1))
        yield
    finally:
        await server.stop()
