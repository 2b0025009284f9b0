"""One API key and the line of a key file that holds it. Pure.

A line is `NAME sha256:HEX`, then what limits the key, in any order: `requests-per-minute=60`,
`tokens-per-minute=20000`, `concurrent=8`, `expires=2027-01-31T00:00:00+00:00`. `#` begins a comment line.
Lines that hold a key itself, `KEY` or `NAME KEY`, are read too: keys that were made elsewhere need no tool.

A key is identified by its digest; its name is only shown. One without a name is shown by the beginning of its
digest, which stays the same whatever else the file holds.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from dataclasses import dataclass
from typing import Final

from spanmesh_proto.errors import MeshError

_DIGEST: Final = "sha256:"
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_MAX_LIMIT: Final = 10**12
# Of two of a thousand keys, the chance that these digits are the same is 2e-9.
OWN_NAME_DIGITS: Final = 12
_OWN_NAME: Final = "key-"


@dataclass(frozen=True)
class KeyRecord:
    """A key that may use the API.

    Attributes:
        name: For people: logs, errors, `mesh keys`. Another key may have had it before.
        digest: SHA-256 of the key, 32 bytes.
        requests_per_minute: Most requests, or None for no limit.
        tokens_per_minute: Most tokens of prompts and answers, or None for no limit.
        expires_at: When it stops working, with its time zone, or None for never.
        is_plain: Whether the line holds the key itself.
        max_concurrent: Most answers under way at once, or None for all slots of a model but one.
        is_named: Whether the line gives the name.
    """

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    expires_at: dt.datetime | None = None
    is_plain: bool = False
    max_concurrent: int | None = None
    is_named: bool = True

    @property
    def identity(self) -> str:
        """What everything that belongs to the key is kept under: its digest, 64 hexadecimal digits."""
        return self.digest.hex()

    def is_expired(self, now_s: float) -> bool:
        """Whether it has stopped working.

        Args:
            now_s: Unix seconds.
        """
        return self.expires_at is not None and self.expires_at.timestamp() <= now_s


def digest_of(key: str) -> bytes:
    """What is kept of a key.

    One round of SHA-256 is enough: keys of `mesh keys add` have 256 random bits, which nobody finds by
    guessing, however fast. A slow hash such as scrypt protects passwords; here it would let anybody who
    sends wrong keys use up the processors.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def own_name(digest: bytes, num_digits: int = OWN_NAME_DIGITS) -> str:
    """What a key without a name is called.

    Args:
        digest: Of the key.
        num_digits: Hexadecimal digits of it that the name has.
    """
    return f"{_OWN_NAME}{digest.hex()[:num_digits]}"


def check_key_name(name: str) -> None:
    """Check what a key is to be called.

    Raises:
        MeshError: Saying what a name may hold.
    """
    if not _NAME.fullmatch(name):
        raise MeshError(
            f"{name!r} cannot be a key's name: use up to 64 letters, digits, dots, dashes, underscores and @"
        )


def parse_key_line(line: str) -> KeyRecord | None:
    """The key of a line; None for one that is empty or a comment.

    Args:
        line: Without its end.

    Raises:
        MeshError: Saying what is wrong, without the line's words: one may be a key.
    """
    words = line.split()
    if not words or words[0].startswith("#"):
        return None
    if len(words) >= 2 and words[1].startswith(_DIGEST):
        return _hashed(words[0], words[1].removeprefix(_DIGEST), words[2:])
    if len(words) > 2:
        raise MeshError("is neither `NAME sha256:HEX …` nor `NAME KEY` nor `KEY`")
    digest, is_named = digest_of(words[-1]), len(words) == 2
    return KeyRecord(words[0] if is_named else own_name(digest), digest, is_plain=True, is_named=is_named)


def format_key_line(record: KeyRecord) -> str:
    """The line that `parse_key_line` reads, without its end."""
    words = [record.name, f"{_DIGEST}{record.digest.hex()}"]
    if record.requests_per_minute is not None:
        words.append(f"requests-per-minute={record.requests_per_minute}")
    if record.tokens_per_minute is not None:
        words.append(f"tokens-per-minute={record.tokens_per_minute}")
    if record.max_concurrent is not None:
        words.append(f"concurrent={record.max_concurrent}")
    if record.expires_at is not None:
        words.append(f"expires={record.expires_at.isoformat()}")
    return " ".join(words)


def _hashed(name: str, digest: str, settings: list[str]) -> KeyRecord:
    if not _HEX.fullmatch(digest):
        raise MeshError("has no 64 small hexadecimal digits after sha256:")
    found: dict[str, str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key in found:
            raise MeshError("says something twice")
        found[key] = value
    record = KeyRecord(
        name=name,
        digest=bytes.fromhex(digest),
        requests_per_minute=_limit(found.pop("requests-per-minute", None)),
        tokens_per_minute=_limit(found.pop("tokens-per-minute", None)),
        max_concurrent=_limit(found.pop("concurrent", None)),
        expires_at=_moment(found.pop("expires", None)),
    )
    if found:
        raise MeshError("says something that is no setting of a key")
    return record


def _limit(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 14 and 1 <= int(text) <= _MAX_LIMIT):
        raise MeshError(f"has a limit that is no number from 1 to {_MAX_LIMIT}")
    return int(text)


def _moment(text: str | None) -> dt.datetime | None:
    if text is None:
        return None
    try:
        moment = dt.datetime.fromisoformat(text)
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
    except ValueError:
        raise MeshError("has an expiry that is no date such as 2027-01-31T00:00:00+00:00") from None
