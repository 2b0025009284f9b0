"""Join token: encoding and decoding."""

from __future__ import annotations

import base64
import binascii
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgpack

from spanmesh_proto.addresses import split_address
from spanmesh_proto.errors import ClusterError, InvalidJoinToken
from stages.units import format_duration

if TYPE_CHECKING:
    from pathlib import Path

TOKEN_VERSION: Final = 1
_MAX_TOKEN_CHARS: Final = 4096
_FINGERPRINT_BYTES: Final = 32


@dataclass(frozen=True)
class JoinToken:
    """Address, secret and fingerprint that a host needs to join."""

    addresses: tuple[str, ...]
    """Addresses of the membership service, `host:port`, the best first."""
    secret: str = field(repr=False)
    """Proof of possession of the token."""
    fingerprint: bytes
    """sha256 of the head's certificate in DER form, 32 bytes."""
    expires_at_s: int
    """Expiry, Unix seconds by the head's clock."""

    def check_expiry(self, now_s: float) -> None:
        """Check that the token is valid.

        Args:
            now_s: Unix time.

        Raises:
            InvalidJoinToken: With the time of its expiry.
        """
        if now_s >= self.expires_at_s:
            raise InvalidJoinToken(f"{self._expiry(now_s)}; start `mesh serve` again for a new one")

    def doubt(self, now_s: float) -> str:
        """Remark on a failure to join with a token that has expired by another clock than the head's.

        Only the head's counts, so that this is a likely reason at most.

        Args:
            now_s: Unix time here.

        Returns:
            Empty if it is valid by this clock.
        """
        if now_s < self.expires_at_s:
            return ""
        return f"by this host's clock {self._expiry(now_s)}: use the line that the head printed last"

    def _expiry(self, now_s: float) -> str:
        when = datetime.fromtimestamp(self.expires_at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"the join token expired at {when}, {format_duration(now_s - self.expires_at_s)} ago"


def encode(token: JoinToken) -> str:
    """The token as one word of letters, digits, `-` and `_`."""
    fields = [TOKEN_VERSION, list(token.addresses), token.secret, token.fingerprint, token.expires_at_s]
    return base64.urlsafe_b64encode(msgpack.packb(fields)).rstrip(b"=").decode()


def decode(text: str) -> JoinToken:
    """The token from its text; surrounding white space is ignored.

    Raises:
        InvalidJoinToken: If the text is malformed, truncated, or of another version.
    """
    word = text.strip()
    if not word:
        raise InvalidJoinToken(
            "the join token is empty; copy the whole `mesh join` line that the head printed"
        )
    fields = _unpack(word)
    if not isinstance(fields, list) or not fields or not isinstance(fields[0], int):
        raise _malformed(word)
    if fields[0] != TOKEN_VERSION:
        raise InvalidJoinToken(
            f"the join token has version {fields[0]}, this program reads version {TOKEN_VERSION}: "
            "install the same spanmesh on both hosts"
        )
    match fields[1:]:
        case [list(addresses), str(secret), bytes(fingerprint), int(expires_at_s)] if (
            addresses
            and all(_is_address(address) for address in addresses)
            and secret
            and len(fingerprint) == _FINGERPRINT_BYTES
            and 0 <= expires_at_s < 2**40
        ):
            return JoinToken(tuple(addresses), secret, fingerprint, expires_at_s)
    raise _malformed(word)


def _is_address(field: object) -> bool:
    try:
        split_address(field if isinstance(field, str) else "")
    except ClusterError:
        return False
    return True


def _unpack(word: str) -> object:
    if len(word) > _MAX_TOKEN_CHARS:
        raise _malformed(word)
    try:
        padded = word.encode("ascii") + b"=" * (-len(word) % 4)
        fields: object = msgpack.unpackb(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (UnicodeEncodeError, binascii.Error, ValueError, msgpack.UnpackException) as error:
        raise _malformed(word) from error
    return fields


def _malformed(word: str) -> InvalidJoinToken:
    shown = word if len(word) <= 16 else f"{word[:8]}…{word[-4:]} ({len(word)} characters)"
    return InvalidJoinToken(
        f"{shown!r} is not a join token; copy the whole `mesh join` line that the head printed"
    )


def read_token(path: Path) -> str:
    """The token in a file that `mesh serve --token-file` wrote.

    Args:
        path: The file; `-` is standard input.

    Raises:
        ClusterError: If it cannot be read.
    """
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ClusterError(f"cannot read the join token in {path}: {reason}", param="--token-file") from error
