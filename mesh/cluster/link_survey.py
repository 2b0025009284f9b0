"""Link survey: every host measures its link to every other."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import structlog

from mesh.cluster.link_probe import carry_out, links_of, order_of
from mesh.placement.links import Link, LinkProbeOptions, Links
from spanmesh_proto.addresses import join_address
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from mesh.cluster.members import Member, Members
    from mesh.cluster.membership_server import MembershipService
    from stages.transport.channels import Identity

# Time for the way to a host and back, beyond that of its links.
_REPORT_S: Final = 5.0

log = structlog.get_logger()


class LinkSurvey:
    """Measurement of all links. One survey runs at a time.

    Args:
        own: Host of the head, with its echo service.
        members: Hosts; the head's own may be among them.
        service: Membership service for the others.
        secret: Secret of the join token.
        identity: TLS identity of this host.
    """

    def __init__(
        self, own: Member, members: Members, service: MembershipService, secret: str, identity: Identity
    ) -> None:
        self._own = own
        self._members = members
        self._service = service
        self._secret = secret
        self._identity = identity
        self._ids = itertools.count(1)
        self._turn = asyncio.Lock()

    @property
    def head(self) -> str:
        """Name of the head's host; distinct from a joined host's with the same name."""
        own = self._own
        is_taken = any(
            other.name == own.name and other.ray_node_name != own.ray_node_name for other in self._members
        )
        return f"{own.name} (head)" if is_taken else own.name

    async def measure(self, options: LinkProbeOptions) -> Links:
        """Links from every host to every other, the head's included.

        Round trips are measured by all hosts at the same time, one link of each at a time. Bandwidths are
        measured by one host after the other, as two transfers over one wire would share it. Each link is an
        order of its own, so that a cancelled survey starts no further one.
        """
        async with self._turn:
            hosts = {member.name: member for member in self._members}
            # The head's entry among the members, if there is one, has no echo service.
            hosts[self.head] = replace(self._own, name=self.head)
            if options.bulk_bytes:
                measured = [await self._from(member, hosts, options) for member in hosts.values()]
            else:
                measured = await asyncio.gather(
                    *(self._from(member, hosts, options) for member in hosts.values())
                )
            return Links(tuple(itertools.chain.from_iterable(measured)))

    async def _from(self, member: Member, hosts: dict[str, Member], options: LinkProbeOptions) -> list[Link]:
        if not member.echo_port:
            # It runs a version without this service.
            return []
        found: list[Link] = []
        for other in hosts.values():
            if other.name != member.name and other.echo_port:
                found += await self._between(member, other, options)
        return found

    async def _between(self, member: Member, other: Member, options: LinkProbeOptions) -> list[Link]:
        target = join_address(other.address_for(member), other.echo_port)
        order = order_of(next(self._ids), {other.name: target}, options)
        timeout_s = _REPORT_S + options.patience_s
        try:
            async with asyncio.timeout(timeout_s):
                if member.ray_node_name == self._own.ray_node_name:
                    report = await carry_out(order, member.name, self._secret, self._identity)
                else:
                    report = await self._service.ask_links(member.name, order)
        except TimeoutError:
            reason = f"{member.name} did not report within {timeout_s:.0f} s"
        except MeshError as error:
            reason = error.message
        else:
            return links_of(member.name, report)
        log.warning("links_not_measured", host=member.name, target=other.name, reason=reason)
        return [Link(member.name, other.name, failure=reason)]
