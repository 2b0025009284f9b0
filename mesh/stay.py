"""One stay of this host in a mesh: from its admission until it is let go, or until the connection ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from mesh.cluster.membership_client import Membership, find_head
from mesh.util.tasks import first_of
from spanmesh_proto.errors import ClusterError, MeshError

if TYPE_CHECKING:
    from mesh.cluster.join_token import JoinToken
    from mesh.home import Home, Node
    from mesh.util.tasks import Interruption

log = structlog.get_logger()

# Moving layers means to bring them to another host: that may take minutes, but not for ever.
_LEAVE_S: Final = 600.0


class Stay:
    """Joins once.

    Args:
        token: Of the mesh.
        home: This host.
        interruption: Asks to leave.

    Attributes:
        was_admitted: Whether the head took this host in.
        was_ready: Whether this host was a member, with a Ray node that ran.
    """

    def __init__(self, token: JoinToken, home: Home, interruption: Interruption) -> None:
        self._token = token
        self._home = home
        self._interruption = interruption
        self._wants_to_leave = asyncio.Event()
        self.was_admitted = False
        self.was_ready = False

    async def run(self) -> None:
        """Return when the head has let this host go, or when it has asked to leave and the head is gone.

        Raises:
            JoinError: If the head refuses this host, or is gone.
            ClusterError: If this host's Ray node does not start, or ends.
        """
        head = await find_head(self._token)
        member = await self._home.member(head.address)
        async with Membership(head, self._token.secret, member) as membership:
            access = await membership.join()
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
                node = self._home.node(member, access)
                if node is None:
                    raise ClusterError("the head has another Ray cluster than before")
                await first_of(_listen(membership), self._serve(membership, node), self._leave(membership))
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
        log.info("leaving", wait="until what is here has moved; Ctrl-C again leaves at once")
        await membership.report_leaving()
        await asyncio.sleep(_LEAVE_S)
        log.warning("leaving_at_once", reason=f"the head has not let this host go within {_LEAVE_S:g} s")


async def _listen(membership: Membership) -> None:
    async for state in membership.states():
        log.info("head_says", state=state)
