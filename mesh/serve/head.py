"""The head of a mesh: its Ray node, its membership service, its join token."""

from __future__ import annotations

import datetime as dt
import secrets
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from mesh.cluster.addresses import join_address
from mesh.cluster.authority import Authority
from mesh.cluster.certificate import make_certificate
from mesh.cluster.echo import EchoServer
from mesh.cluster.join_token import JoinToken, encode
from mesh.cluster.link_survey import LinkSurvey
from mesh.cluster.members import Member, Members
from mesh.cluster.membership_server import MembershipServer, MembershipService, RayAccess
from mesh.cluster.ray_driver import RayDriver
from mesh.cluster.ray_node import RayNode, RayNodeConfig, new_ray_token
from mesh.serve.token_file import token_file
from stages.fetch import FetchSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from mesh.cluster.host_facts import HostFacts
    from mesh.interruption import Interruption
    from mesh.serve.options import ServeOptions
    from stages.cutting import StageCache

log = structlog.get_logger()


@dataclass(frozen=True)
class Head:
    """What the rest of `mesh serve` needs of the head.

    Attributes:
        driver: Places actors.
        own: This host.
        members: Hosts; this one among them unless it holds no layers.
        service: Tells hosts what goes on.
        node: This host's Ray node.
        survey: Measures the links between hosts.
        authority: Signs the certificates of stages and hosts.
        write_token: Writes the join token to the file that the user wants it in.
    """

    driver: RayDriver
    own: Member
    members: Members
    service: MembershipService
    node: RayNode
    survey: LinkSurvey
    authority: Authority
    write_token: Callable[[str], None]

    @property
    def token(self) -> str:
        """The join token that is good now, as text."""
        return encode(self.service.token)

    @property
    def source(self) -> FetchSource:
        """Where hosts fetch stage files, and what proves now that they may."""
        token = self.service.token
        return FetchSource(token.addresses[0], self.authority.certificate_pem, token.secret)


@asynccontextmanager
async def open_head(
    options: ServeOptions, facts: HostFacts, cache: StageCache, interruption: Interruption
) -> AsyncIterator[Head]:
    """Ray and the membership service run while in the block; afterwards every host has been sent home.

    Args:
        options: What the user says.
        facts: Of this host.
        cache: Whose files are sent to hosts.
        interruption: Armed again after Ray has taken the signals for itself.

    Raises:
        ClusterError: If Ray does not start.
        PortInUse: If the membership service cannot listen.
    """
    ray_token = new_ray_token()
    own = Member(
        name=options.name,
        address=options.advertise,
        facts=facts,
        ray_node_name=f"{options.name}.{secrets.token_hex(4)}",
        is_ready=True,
    )
    with _ray_node(RayNodeConfig(own.address, own.ray_node_name, ray_token)) as node:
        ray = RayAccess(await node.wait_ready(), ray_token)
        with _ray_driver(node, ray.address, interruption) as driver:
            members = Members()
            if not options.is_head_only:
                members.admit(own)
            async with (
                _membership(options, facts, ray, members, cache) as (service, authority),
                _survey(own, members, service, authority) as survey,
            ):
                with token_file(options.token_path, encode(service.token)) as write_token:
                    yield Head(driver, own, members, service, node, survey, authority, write_token)


@asynccontextmanager
async def _survey(
    own: Member, members: Members, service: MembershipService, authority: Authority
) -> AsyncIterator[LinkSurvey]:
    """This host answers probes, and asks the others."""
    # The second name is what the survey calls this host if another has the first.
    identity = authority.own_identity([own.name, f"{own.name} (head)"], own.address)
    secret = service.link_secret
    echo = EchoServer(secret, lambda: identity)
    try:
        port = await echo.start(own.address)
        yield LinkSurvey(replace(own, echo_port=port), members, service, secret, identity)
    finally:
        await echo.stop()


@contextmanager
def _ray_node(config: RayNodeConfig) -> Iterator[RayNode]:
    node = RayNode.start(config)
    try:
        yield node
    finally:
        node.stop()


@contextmanager
def _ray_driver(node: RayNode, address: str, interruption: Interruption) -> Iterator[RayDriver]:
    driver = RayDriver(node, address)
    interruption.arm()
    try:
        yield driver
    finally:
        driver.close()


@asynccontextmanager
async def _membership(
    options: ServeOptions, facts: HostFacts, ray: RayAccess, members: Members, cache: StageCache
) -> AsyncIterator[tuple[MembershipService, Authority]]:
    certificate = make_certificate(dt.datetime.now(dt.UTC))
    token = JoinToken(
        addresses=(),  # known once the service listens; to check a host, they do not matter
        secret=secrets.token_urlsafe(32),
        fingerprint=certificate.fingerprint,
        expires_at_s=int(time.time() + options.token_hours * 3600),
    )
    authority = Authority(certificate)
    service = MembershipService(
        token=token, ray=ray, members=members, cache=cache, versions=facts.versions, authority=authority
    )
    server = MembershipServer(service, certificate)
    port = await server.start(options.advertise, options.join_port)
    address = join_address(options.advertise, port)
    service.listens_at(address)
    log.info("membership_open", address=address, token_hours=options.token_hours)
    try:
        yield service, authority
    finally:
        await server.stop()
