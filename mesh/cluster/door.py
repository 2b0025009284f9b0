"""Who may come in: whoever brings the join token that is good now, and was not shown out before."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from mesh.cluster.admission import check_report, check_secret
from spanmesh_proto.errors import InvalidJoinToken

if TYPE_CHECKING:
    from mesh.cluster.host_facts import Versions
    from mesh.cluster.join_token import JoinToken
    from spanmesh_proto import membership_pb2 as wire


class Door:
    """Keeps the join token, and the names of hosts that were evicted.

    Args:
        token: What the head gives out first.

    Attributes:
        token: What it gives out now.
    """

    def __init__(self, token: JoinToken) -> None:
        self.token = token
        self._evicted: set[str] = set()

    def check(self, report: wire.HostReport, head: Versions, now_s: float) -> None:
        """Refuse a host that has no right to join, or that could not work with the head.

        Args:
            report: The host's first report.
            head: Versions at the head.
            now_s: Unix time at the head.

        Raises:
            InvalidJoinToken: If the token is not the one of now, expired, or the host was evicted.
            JoinError: See `check_report`.
        """
        if report.name in self._evicted:
            raise eviction(report.name)
        check_report(report, self.token, head, now_s)

    def check_secret(self, secret: str) -> None:
        """Refuse who does not know the secret of now.

        Raises:
            InvalidJoinToken: If it is another.
        """
        check_secret(secret, self.token)

    def evict(self, name: str) -> None:
        """Never let in a host of this name again, nor anybody with the token that it was given."""
        self._evicted.add(name)
        self.token = replace(self.token, secret=secrets.token_urlsafe(32))

    def is_evicted(self, name: str) -> bool:
        """Whether a host of this name was shown out."""
        return name in self._evicted


def eviction(name: str) -> InvalidJoinToken:
    """What an evicted host is told."""
    return InvalidJoinToken(f"host {name} was evicted from the mesh, and its join token is no longer good")
