"""Admission of hosts: join token, secrets of admitted hosts, versions, and evicted names."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from spanmesh_proto import PROTOCOL_VERSION
from spanmesh_proto.errors import InvalidJoinToken, JoinError, ProtocolVersionMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from mesh.cluster.host_facts import Versions
    from mesh.cluster.join_token import JoinToken
    from spanmesh_proto import membership_pb2 as wire

# Validity of a join token unless another one is requested.
DAY_S: Final = 24 * 3600.0
# Of admitted hosts, the latest. A mesh has tens; only names that are different at each start come near this.
_MOST_REJOIN_SECRETS: Final = 1024
# Less is the slow correction of a clock that runs.
_CLOCK_WAS_SET_S: Final = 60.0


@dataclass(frozen=True)
class Admissions:
    """Hosts that a head admits and refuses; the next head of the mesh continues with them."""

    token: JoinToken
    """Join token, which admits any host until it expires."""
    rejoin_secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Secrets by which hosts that were admitted may join again, by host name."""
    evicted: tuple[str, ...] = ()
    """Names of evicted hosts."""


class AdmissionControl:
    """Admission of hosts by the join token, or by the secret that a host got when it was admitted.

    A rejoin secret is random, made for one name, and has no expiry: a host that lost its network comes back
    whatever became of the token. Secrets derived from one key and the name would do without a list, but
    a machine that had joined under several names could come back under the others after an eviction.

    How long the token is still valid is known from a clock that does not jump: small computers without a
    battery start with an old time, which is set right minutes later.

    Args:
        admissions: Token, and hosts of earlier heads.
        token_lifetime_s: Longest validity of the token from now on, and that of one that replaces it.
        clock_s: Wall clock, Unix seconds.
        steady_s: Clock that only runs, seconds.

    Attributes:
        fetch_secret: Secret by which stages fetch their files. It is another one than the token's, which may
            expire while stages are still to be loaded, and which all holders of the token know.
    """

    def __init__(
        self,
        admissions: Admissions,
        token_lifetime_s: float,
        *,
        clock_s: Callable[[], float],
        steady_s: Callable[[], float],
    ) -> None:
        self._token = admissions.token
        self._clock_s = clock_s
        self._steady_s = steady_s
        # By the clock that only runs.
        self._expires_s = steady_s() + min(self._token.expires_at_s - clock_s(), token_lifetime_s)
        self.fetch_secret = new_secret()
        self._token_lifetime_s = token_lifetime_s
        self._rejoin_secrets = dict(admissions.rejoin_secrets)
        self._evicted = dict.fromkeys(admissions.evicted)

    @property
    def token(self) -> JoinToken:
        """Current token. If the wall clock was set since it was made, its expiry is by the new time."""
        expires_at_s = self._clock_s() + self._expires_s - self._steady_s()
        if abs(expires_at_s - self._token.expires_at_s) > _CLOCK_WAS_SET_S:
            self._token = replace(self._token, expires_at_s=int(expires_at_s))
        return self._token

    def listens_at(self, *addresses: str) -> None:
        """Set the addresses of the membership service, `host:port`, the preferred one first."""
        self._token = replace(self._token, addresses=addresses)

    @property
    def admissions(self) -> Admissions:
        """The state, for the next head."""
        return Admissions(self.token, dict(self._rejoin_secrets), tuple(self._evicted))

    def check(self, report: wire.HostReport, head: Versions) -> None:
        """Check that a host may join, and that it can work with the head.

        Args:
            report: First report of the host.
            head: Versions of the head.

        Raises:
            InvalidJoinToken: If the host was evicted; or if it shows neither its rejoin secret nor the
                current token, or the token has expired.
            JoinError: See `check_versions`.
        """
        if report.name in self._evicted:
            raise eviction(report.name)
        if not self._is_known(report):
            check_secret(report.secret, self.token)
            self.token.check_expiry(self._clock_s())
        check_versions(report, head)

    def rejoin_secret(self, report: wire.HostReport) -> str:
        """Secret by which a host that is admitted now may join again.

        It is the one that the host showed: another could get lost on its way. A host that was admitted by
        the token gets a new one, which replaces that of an earlier host of this name.
        """
        secret = self._rejoin_secrets.pop(report.name, "") if self._is_known(report) else new_secret()
        # The latest ones are the last.
        self._rejoin_secrets.pop(report.name, None)
        self._rejoin_secrets[report.name] = secret
        while len(self._rejoin_secrets) > _MOST_REJOIN_SECRETS:
            del self._rejoin_secrets[next(iter(self._rejoin_secrets))]
        return secret

    def forget(self, name: str) -> None:
        """Void the rejoin secret of a host that leaves for good."""
        self._rejoin_secrets.pop(name, None)

    def check_fetch(self, secret: str) -> None:
        """Check the secret of a stage that fetches its file, in constant time.

        Raises:
            InvalidJoinToken: If it is not the current one.
        """
        if not hmac.compare_digest(secret.encode(), self.fetch_secret.encode()):
            raise InvalidJoinToken("stage files are sent to stages of this head only, and its secret differs")

    def evict(self, name: str, connected: Collection[str]) -> None:
        """Refuse hosts of this name from now on, and replace the token by one with its full validity.

        Rejoin secrets of hosts that are not connected are void: the evicted host may have got them under
        other names.

        Args:
            name: Name of the host.
            connected: Names of all hosts that are connected.
        """
        self._evicted[name] = None
        self._rejoin_secrets = {
            host: secret
            for host, secret in self._rejoin_secrets.items()
            if host in connected and host != name
        }
        self._expires_s = self._steady_s() + self._token_lifetime_s
        expires_at_s = int(self._clock_s() + self._token_lifetime_s)
        self._token = replace(self._token, secret=new_secret(), expires_at_s=expires_at_s)
        self.fetch_secret = new_secret()

    def can_rejoin(self, name: str) -> bool:
        """Whether a host of this name has a rejoin secret."""
        return name in self._rejoin_secrets

    def is_evicted(self, name: str) -> bool:
        """Whether a host of this name was evicted."""
        return name in self._evicted

    def _is_known(self, report: wire.HostReport) -> bool:
        """Whether a host shows the rejoin secret of its name; compared in constant time."""
        secret = self._rejoin_secrets.get(report.name)
        return secret is not None and hmac.compare_digest(report.rejoin_secret.encode(), secret.encode())


def check_secret(given: str, token: JoinToken) -> None:
    """Check a secret, in constant time.

    Raises:
        InvalidJoinToken: If it is not the token's.
    """
    if not hmac.compare_digest(given.encode(), token.secret.encode()):
        raise InvalidJoinToken("the join token is not this mesh's; use the line that the head printed last")


def new_secret() -> str:
    """A random secret of 256 bits."""
    return secrets.token_urlsafe(32)


def check_versions(report: wire.HostReport, head: Versions) -> None:
    """Check that a host can work with the head.

    Args:
        report: First report of the host.
        head: Versions of the head.

    Raises:
        ProtocolVersionMismatch: If the two speak different protocol versions.
        JoinError: If the versions of Ray or Python differ, which Ray does not support.
    """
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


def eviction(name: str) -> InvalidJoinToken:
    """Error for an evicted host."""
    return InvalidJoinToken(
        f"host {name} was evicted from the mesh, and its join token is void; with a new one it may join "
        "under another --name"
    )
