"""Admission of hosts: token, versions and evicted names."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from spanmesh_proto import PROTOCOL_VERSION
from spanmesh_proto.errors import InvalidJoinToken, JoinError, ProtocolVersionMismatch

if TYPE_CHECKING:
    from mesh.cluster.host_facts import Versions
    from mesh.cluster.join_token import JoinToken
    from spanmesh_proto import membership_pb2 as wire


def check_secret(given: str, token: JoinToken) -> None:
    """Compare in constant time.

    Raises:
        InvalidJoinToken: If it is another secret.
    """
    if not hmac.compare_digest(given.encode(), token.secret.encode()):
        raise InvalidJoinToken(
            "the join token is not the one of this mesh; use the line that the head printed last"
        )


def check_report(report: wire.HostReport, token: JoinToken, head: Versions, now_s: float) -> None:
    """Refuse a host that has no right to join, or that could not work with the head.

    Args:
        report: The host's first report.
        token: What the head gave out.
        head: Versions at the head.
        now_s: Unix time at the head.

    Raises:
        InvalidJoinToken: If the secret is wrong or the token expired.
        ProtocolVersionMismatch: If the two speak different protocol versions.
        JoinError: If Ray or Python differ: Ray connects no two versions.
    """
    check_secret(report.secret, token)
    token.check_expiry(now_s)
    if report.protocol_version != PROTOCOL_VERSION:
        raise ProtocolVersionMismatch(
            f"the host speaks protocol version {report.protocol_version} (spanmesh "
            f"{report.software_version}), the "
            f"head speaks {PROTOCOL_VERSION} (spanmesh {head.software}): install the same spanmesh on both"
        )
    if report.ray_version != head.ray:
        raise JoinError(
            f"the host runs Ray {report.ray_version}, the head runs Ray {head.ray}: they must be equal, "
            "install the "
            "versions of constraints.txt on both"
        )
    if _minor(report.python_version) != _minor(head.python):
        raise JoinError(
            f"the host runs Python {report.python_version}, the head runs {head.python}: the first two "
            "numbers "
            "must be equal"
        )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


class AdmissionControl:
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
