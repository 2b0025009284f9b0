"""Admission of hosts: check of token and versions, and evicted names."""

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
    """Check a secret, in constant time.

    Raises:
        InvalidJoinToken: If it is not the token's.
    """
    if not hmac.compare_digest(given.encode(), token.secret.encode()):
        raise InvalidJoinToken("the join token is not this mesh's; use the line that the head printed last")


def check_report(report: wire.HostReport, token: JoinToken, head: Versions, now_s: float) -> None:
    """Check that a host may join, and that it can work with the head.

    Args:
        report: First report of the host.
        token: Current join token.
        head: Versions of the head.
        now_s: Unix time at the head.

    Raises:
        InvalidJoinToken: If the secret is wrong or the token expired.
        ProtocolVersionMismatch: If the two speak different protocol versions.
        JoinError: If the versions of Ray or Python differ, which Ray does not support.
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
    """Current join token, and names of evicted hosts.

    Args:
        token: First token.

    Attributes:
        token: Current token.
    """

    def __init__(self, token: JoinToken) -> None:
        self.token = token
        self._evicted: set[str] = set()

    def check(self, report: wire.HostReport, head: Versions, now_s: float) -> None:
        """Check that a host may join, and that it can work with the head.

        Args:
            report: First report of the host.
            head: Versions of the head.
            now_s: Unix time at the head.

        Raises:
            InvalidJoinToken: If the token is not the current one or expired, or the host was evicted.
            JoinError: See `check_report`.
        """
        if report.name in self._evicted:
            raise eviction(report.name)
        check_report(report, self.token, head, now_s)

    def check_secret(self, secret: str) -> None:
        """Check a secret against the current one.

        Raises:
            InvalidJoinToken: If it differs.
        """
        check_secret(secret, self.token)

    def evict(self, name: str) -> None:
        """Refuse hosts of this name from now on, and replace the token."""
        self._evicted.add(name)
        self.token = replace(self.token, secret=secrets.token_urlsafe(32))

    def is_evicted(self, name: str) -> bool:
        """Whether a host of this name was evicted."""
        return name in self._evicted


def eviction(name: str) -> InvalidJoinToken:
    """Error for an evicted host."""
    return InvalidJoinToken(f"host {name} was evicted from the mesh, and its join token is void")
