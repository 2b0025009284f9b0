"""Identity of a head: certificate, join token and admitted hosts, in a file that outlives `mesh serve`."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

import structlog

from mesh.cluster.admission import Admissions, new_secret
from mesh.cluster.certificates import Certificate, make_certificate
from mesh.cluster.join_token import JoinToken
from spanmesh_proto.errors import ClusterError
from stages.files import locked, write_private_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OPTION: Final = "--identity"
_FORMAT: Final = 1

log = structlog.get_logger()


@dataclass(frozen=True)
class HeadIdentity:
    """Credentials by which hosts recognise a head, and by which it recognises hosts."""

    certificate: Certificate
    """Certificate of the mesh's authority, with its key."""
    admissions: Admissions
    """Join token, without addresses, and hosts that are admitted or refused."""
    join_port: int = 0
    """Port of the membership service, which the token names; 0 before it has listened."""
    term: int = 0
    """Term of the head that recorded it; see `HeadState.term`."""

    def is_of(self, certificate_pem: str) -> bool:
        """Whether a certificate is the one of this identity: then it is the same mesh."""
        return self.certificate.certificate_pem.decode() == certificate_pem

    def renewed(self, now_s: float, token_lifetime_s: float) -> HeadIdentity:
        """The identity with a token that is valid: the present one, or another if that has expired.

        Certificate and admitted hosts stay.

        Args:
            now_s: Unix time.
            token_lifetime_s: Validity of another token.
        """
        token = self.admissions.token
        if token.expires_at_s > now_s:
            return self
        token = replace(token, secret=new_secret(), expires_at_s=int(now_s + token_lifetime_s))
        return replace(self, admissions=replace(self.admissions, token=token))


class IdentityFile:
    """Private file of an identity; locked while a head uses it.

    Args:
        path: Path of the file; its folder must exist.

    Attributes:
        path: As given, with symbolic links followed: each name of a file has the same lock.
        identity: Identity in the file; None before the first one is saved.

    Raises:
        ClusterError: If a running head uses the file, or if it cannot be read, is damaged, was written by
            another version, or is open to other users.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.path = path = path.resolve()
        except RuntimeError as error:
            raise _refusal(f"cannot keep the identity in {path}: its symbolic links form a loop") from error
        # Refused before a lock is made beside it: it may be any file, named by mistake.
        self._load()
        try:
            self._lock = locked(path.with_name(f"{path.name}.lock"))
        except BlockingIOError:
            raise _refusal(f"another `mesh serve` uses the identity {path}: give each its own file") from None
        except OSError as error:
            raise _refusal(f"cannot keep the identity in {path}: {error.strerror}") from error
        try:
            self.identity = self._load()
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        """Lock the file for the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock the file and keep its content."""
        os.close(self._lock)

    def save(self, identity: HeadIdentity) -> None:
        """Replace the content, whole or not at all; it is durable when this returns.

        Raises:
            OSError: If it cannot be written.
        """
        if identity == self.identity:
            return
        fields = _fields_of(identity)
        content = {"format": _FORMAT, "sha256": _digest(fields), "identity": fields}
        write_private_file(self.path, json.dumps(content, indent=1) + "\n")
        self.identity = identity

    def _load(self) -> HeadIdentity | None:
        text = self._text()
        if text is None:
            return None
        try:
            content = json.loads(text)
            version = content["format"]
            fields = content.get("identity")
            is_whole = version != _FORMAT or content["sha256"] == _digest(fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            version, fields, is_whole = None, None, False
        remedy = "restore it from a copy, or remove it for a new mesh, whose token hosts need then"
        if not is_whole:
            raise _refusal(f"{_OPTION} {self.path} is damaged, or no identity of a head: {remedy}")
        if version != _FORMAT:
            raise _refusal(
                f"{_OPTION} {self.path} has format {version!r}, this version of spanmesh reads {_FORMAT}: "
                f"use the version that wrote it; or {remedy}"
            )
        return _identity_from(fields)

    def _text(self) -> str | None:
        """Text of the file; None if there is none.

        Raises:
            ClusterError: If it cannot be read, or other users can read it.
        """
        try:
            # Opening a pipe would block until its other end is opened.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _refusal(f"cannot read {_OPTION} {self.path}: {error.strerror}") from error
        try:
            self._check_privacy(os.fstat(descriptor))
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read().decode(errors="replace")
        finally:
            os.close(descriptor)

    def _check_privacy(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise _refusal(f"{_OPTION} {self.path} is not a regular file: name another")
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise _refusal(
                f"{_OPTION} {self.path} holds the mesh's private key and is not private to this user (it is "
                f"user {found.st_uid}'s, with mode {stat.S_IMODE(found.st_mode):o}): remove it for a new "
                "mesh; or, if no other user has read it, make it this user's and run `chmod 600` on it"
            )


def new_identity(now_s: float, token_lifetime_s: float) -> HeadIdentity:
    """Identity of a new mesh.

    Args:
        now_s: Unix time.
        token_lifetime_s: Validity of the join token.
    """
    certificate = make_certificate(dt.datetime.fromtimestamp(now_s, dt.UTC))
    # The addresses are known once the service listens, and are not needed to check a host.
    token = JoinToken((), new_secret(), certificate.fingerprint, int(now_s + token_lifetime_s))
    return HeadIdentity(certificate, Admissions(token))


@contextmanager
def open_identity(path: Path | None) -> Iterator[IdentityFile | None]:
    """Context in which an identity is kept in a file; None for a mesh that ends with its head.

    Args:
        path: Path of the file, or None.

    Raises:
        ClusterError: See `IdentityFile`.
    """
    if path is None:
        yield None
        return
    with IdentityFile(path) as file:
        yield file


def starting_identity(
    file: IdentityFile | None,
    former: HeadIdentity | None,
    *,
    term: int,
    now_s: float,
    token_lifetime_s: float,
) -> HeadIdentity:
    """Identity of a head that starts: the one in its file, of the head that crashed before it, or a new one.

    It is in the file when this returns, before any host or operator learns of the token.

    Args:
        file: File of the identity, if it is to be kept.
        former: Identity of a head that crashed, if there was one.
        term: Term of the head that starts.
        now_s: Unix time.
        token_lifetime_s: Validity of a new token.

    Raises:
        ClusterError: If the file cannot be written.
    """
    kept = None if file is None else file.identity
    found = kept or former
    if kept is not None and former is not None and kept.certificate == former.certificate:
        # Both are of one mesh. Of one head, too: then the file, which is written first, is the newer one.
        found = max(kept, former, key=lambda identity: identity.term)
    if found is None:
        identity = new_identity(now_s, token_lifetime_s)
    else:
        identity = found.renewed(now_s, token_lifetime_s)
        if identity != found:
            log.info("join_token_replaced", reason="the former one has expired")
    identity = replace(identity, term=term)
    if file is not None:
        try:
            file.save(identity)
        except OSError as error:
            raise _refusal(f"cannot write {_OPTION} {file.path}: {error.strerror}") from error
    return identity


def _fields_of(identity: HeadIdentity) -> dict[str, Any]:
    admissions = identity.admissions
    return {
        "term": identity.term,
        "join_port": identity.join_port,
        "certificate_pem": identity.certificate.certificate_pem.decode(),
        "private_key_pem": identity.certificate.private_key_pem.decode(),
        "secret": admissions.token.secret,
        "expires_at_s": admissions.token.expires_at_s,
        "rejoin_secrets": dict(admissions.rejoin_secrets),
        "evicted": list(admissions.evicted),
    }


def _identity_from(fields: dict[str, Any]) -> HeadIdentity:
    certificate = Certificate(fields["certificate_pem"].encode(), fields["private_key_pem"].encode())
    token = JoinToken((), fields["secret"], certificate.fingerprint, fields["expires_at_s"])
    admissions = Admissions(token, fields["rejoin_secrets"], tuple(fields["evicted"]))
    return HeadIdentity(certificate, admissions, fields["join_port"], fields["term"])


def _digest(fields: object) -> str:
    """Checksum of the content: it detects damage, not forgery."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _refusal(message: str) -> ClusterError:
    return ClusterError(message, param=_OPTION)
