"""API keys: key file, key lines, and lookup by digest."""

from __future__ import annotations

import datetime as dt
import fcntl
import hashlib
import hmac
import os
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self

import structlog

from spanmesh_proto.errors import MeshError
from stages.files import user_folder, write_private_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

# A line is `NAME sha256:HEX`, then what limits the key, in any order: `requests-per-minute=60`,
# `tokens-per-minute=20000`, `concurrent=8`, `expires=2027-01-31T00:00:00+00:00`, `may-load=yes` if it may
# load models, `may-record=yes` if its answers may be recorded, and `group=NAME` for keys that share a
# drafter, which is tuned on the answers to all of them. `#` begins a comment line.
# Lines with a plain key, `KEY` or `NAME KEY`, are read too, for keys made by other tools.
#
# A key is identified by its digest; its name is only displayed. A key without a name is displayed by the
# beginning of its digest, which does not depend on other lines of the file.
_DIGEST: Final = "sha256:"
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_MAX_LIMIT: Final = 10**12
# With a thousand keys, the chance that two have the same digits is 2e-9.
OWN_NAME_DIGITS: Final = 12
_OWN_NAME: Final = "key-"
_YES: Final = "yes"
_MAX_BYTES: Final = 4 * 2**20
# `key-` alone identifies no key, though all display names of keys without a name begin with it.
_SHORTEST: Final = len("key-")

log = structlog.get_logger()


@dataclass(frozen=True)
class KeyRecord:
    """A key that may use the API."""

    name: str
    """Name for logs, errors and `mesh keys`. Another key may have had it before."""
    digest: bytes
    """SHA-256 of the key, 32 bytes."""
    requests_per_minute: int | None = None
    """Most requests, or None for no limit."""
    tokens_per_minute: int | None = None
    """Most tokens of prompts and answers, or None for no limit."""
    expires_at: dt.datetime | None = None
    """When it stops working, with its time zone, or None for never."""
    is_plain: bool = False
    """Whether the line holds the key itself."""
    max_concurrent: int | None = None
    """Most concurrent answers, or None for all slots of a model but one."""
    is_named: bool = True
    """Whether the line gives the name."""
    may_load: bool = False
    """Whether its requests may load models of the library."""
    may_record: bool = False
    """Whether its answers may be recorded, to tune drafters on them."""
    group: str | None = None
    """Keys with the same one share a drafter that is tuned on their answers; None for none."""
    num_removals: int = 0
    """How often it was removed from the file while the server ran."""

    @property
    def identity(self) -> str:
        """Key under which everything of it is kept: its digest, 64 hexadecimal digits.

        A key that was removed and comes back has another one: it finds nothing of what its requests left in
        caches, those included that ran when it was removed.
        """
        return self.digest.hex() + (f"-{self.num_removals}" if self.num_removals else "")

    def is_expired(self, now_s: float) -> bool:
        """Whether it has expired.

        Args:
            now_s: Unix seconds.
        """
        return self.expires_at is not None and self.expires_at.timestamp() <= now_s


@dataclass(frozen=True)
class _Stamp:
    """File identity and change time: detects a changed file without reading it."""

    inode: int
    mtime_ns: int
    num_bytes: int


class ApiKeys:
    """The keys that open the API, by digest.

    Args:
        records: At least one.
        path: File of the keys, if it is to be checked for changes before each request.

    Raises:
        MeshError: If there is no key: such a server would be of no use.
    """

    def __init__(self, records: Sequence[KeyRecord], path: Path | None = None) -> None:
        if not records:
            where = "the server" if path is None else f"the API key file {path}"
            raise MeshError(f"{where} holds no key: make one with `mesh keys add NAME`")
        self._records = tuple(records)
        # The records last read: while a file cannot be read no key counts as removed.
        self._latest = self._records
        self._removals: Counter[bytes] = Counter()
        self._listeners: list[Callable[[Collection[str]], None]] = []
        self._path = path
        self._stamp = None if path is None else _stamp(path)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """The keys of a file of `mesh keys`; changes of the file count from the next request on.

        A file that is gone or unreadable opens the API to no key until it can be read again.

        Raises:
            MeshError: If the file cannot be read, is malformed, or holds no key.
        """
        keys = cls(read_key_file(path), path)
        if any(record.is_plain for record in keys._records) and path.stat().st_mode & 0o077:
            log.warning("api_keys_readable_by_others", path=str(path), remedy="chmod 600")
        return keys

    @classmethod
    def from_plain(cls, keys: Mapping[str, str]) -> Self:
        """Keys by name, without limits."""
        return cls([KeyRecord(name, digest_of(key)) for name, key in keys.items()])

    def on_removed(self, listener: Callable[[Collection[str]], None]) -> None:
        """Call a function with the identities of keys that are removed from the file."""
        self._listeners.append(listener)

    def has(self, identity: str) -> bool:
        """Whether there is a key of this identity, by the records that were read last."""
        return any(record.identity == identity for record in self._latest)

    def find(self, key: str) -> KeyRecord | None:
        """The record of a key, or None if there is none. Takes the same time for every key."""
        self._look_again()
        presented = digest_of(key)
        found = None
        for record in self._records:
            if hmac.compare_digest(presented, record.digest):
                found = record
        return found

    def _look_again(self) -> None:
        if self._path is None:
            return
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            records = read_key_file(self._path)
        except MeshError as error:
            self._records = ()
            log.error("api_keys_unreadable", reason=error.message, effect="every request is refused")  # noqa: TRY400
        else:
            log.info("api_keys_changed", names=[record.name for record in records])
            digests = {record.digest for record in records}
            gone = [record for record in self._latest if record.digest not in digests]
            self._records = self._latest = tuple(
                replace(record, num_removals=self._removals[record.digest]) for record in records
            )
            self._removals.update(record.digest for record in gone)
            if gone:
                for listener in self._listeners:
                    listener({record.identity for record in gone})


def digest_of(key: str) -> bytes:
    """SHA-256 of a key, which is all that is kept of it.

    One round of SHA-256 is enough: keys of `mesh keys add` have 256 random bits, which cannot be guessed,
    however fast. A slow hash such as scrypt protects passwords; here it would let anybody who sends wrong
    keys use up the processors.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def own_name(digest: bytes, num_digits: int = OWN_NAME_DIGITS) -> str:
    """Display name of a key without a name.

    Args:
        digest: Digest of the key.
        num_digits: Hexadecimal digits of it in the name.
    """
    return f"{_OWN_NAME}{digest.hex()[:num_digits]}"


def check_key_name(name: str, what: str = "a key's") -> None:
    """Check the name of a key, or of a group of keys.

    Raises:
        MeshError: With the rules for names.
    """
    if not _NAME.fullmatch(name):
        raise MeshError(
            f"{name!r} cannot be {what} name: use up to 64 letters, digits, dots, dashes, underscores and @"
        )


def parse_key_line(line: str) -> KeyRecord | None:
    """The key of a line; None for one that is empty or a comment.

    Args:
        line: Without its end.

    Raises:
        MeshError: With the reason, but without the line's words: one may be a key.
    """
    words = line.split()
    if not words or words[0].startswith("#"):
        return None
    if len(words) >= 2 and words[1].startswith(_DIGEST):
        return _hashed(words[0], words[1].removeprefix(_DIGEST), words[2:])
    if len(words) > 2:
        raise MeshError("is not `NAME sha256:HEX …`, `NAME KEY` or `KEY`")
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
    if record.may_load:
        words.append(f"may-load={_YES}")
    if record.may_record:
        words.append(f"may-record={_YES}")
    if record.group is not None:
        words.append(f"group={record.group}")
    return " ".join(words)


def _hashed(name: str, digest: str, settings: list[str]) -> KeyRecord:
    if not _HEX.fullmatch(digest):
        raise MeshError("needs 64 lower-case hexadecimal digits after sha256:")
    found: dict[str, str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key in found:
            raise MeshError("has a setting twice")
        found[key] = value
    record = KeyRecord(
        name=name,
        digest=bytes.fromhex(digest),
        requests_per_minute=_limit(found.pop("requests-per-minute", None)),
        tokens_per_minute=_limit(found.pop("tokens-per-minute", None)),
        max_concurrent=_limit(found.pop("concurrent", None)),
        expires_at=_moment(found.pop("expires", None)),
        may_load=_right(found.pop("may-load", None)),
        may_record=_right(found.pop("may-record", None)),
        group=_group(found.pop("group", None)),
    )
    if found:
        raise MeshError("has an unknown setting")
    return record


def _limit(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 14 and 1 <= int(text) <= _MAX_LIMIT):
        raise MeshError(f"has a limit that is not a number from 1 to {_MAX_LIMIT}")
    return int(text)


def _moment(text: str | None) -> dt.datetime | None:
    if text is None:
        return None
    try:
        moment = dt.datetime.fromisoformat(text)
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
    except ValueError:
        raise MeshError("has an expiry that is not a date such as 2027-01-31T00:00:00+00:00") from None


def _group(text: str | None) -> str | None:
    if text is not None and not _NAME.fullmatch(text):
        raise MeshError(
            "has a group that is no name of up to 64 letters, digits, dots, dashes, underscores and @"
        )
    return text


def _right(text: str | None) -> bool:
    if text not in {None, _YES, "no"}:
        raise MeshError("has a right that is neither yes nor no")
    return text == _YES


def default_key_file() -> Path:
    """`$XDG_CONFIG_HOME/spanmesh/api-keys`, or `~/.config/spanmesh/api-keys`."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "spanmesh" / "api-keys"


def read_key_file(path: Path) -> tuple[KeyRecord, ...]:
    """All keys, in the file's order; there may be none.

    Raises:
        MeshError: If it cannot be read, or with the number of a malformed line.
    """
    return parse_key_file(path, _read(path))


def parse_key_file(path: Path, text: str) -> tuple[KeyRecord, ...]:
    """All keys of a file's text.

    Args:
        path: For errors.
        text: Text of the file.

    Raises:
        MeshError: With the number of a malformed line.
    """
    records: dict[str, KeyRecord] = {}
    for number, record in _by_line(path, text).items():
        known = records.setdefault(record.name, record)
        # A repeated key without a name changes nothing.
        if known is not record and (known.is_named or record.is_named):
            raise MeshError(f"line {number} of the API key file {path} names {record.name} a second time")
    return tuple(records.values())


def add_key(path: Path, record: KeyRecord) -> None:
    """Add a key at the end; the file and its folder are created if needed.

    Raises:
        MeshError: If there is a key of that name, or the file cannot be read or written.
    """
    check_key_name(record.name)
    if record.group is not None:
        check_key_name(record.group, "a group's")
    with _editing(path):
        text = _read(path) if path.exists() else ""
        if any(known.name == record.name for known in parse_key_file(path, text)):
            raise MeshError(
                f"{path} has a key {record.name} already: choose another name, or remove that one first with"
                f" `mesh keys rm {record.name}`"
            )
        if text and not text.endswith("\n"):
            text += "\n"
        write_private_file(path, f"{text}{format_key_line(record)}\n")


def remove_key(path: Path, name: str) -> str:
    """Remove a key; every other line stays as it is.

    Args:
        path: The file.
        name: Name of the key, or enough digits of a display name to identify it.

    Returns:
        The full name.

    Raises:
        MeshError: If no key or several keys match, or the file cannot be read or written.
    """
    with _editing(path):
        text = _read(path)
        found = _called(path, parse_key_file(path, text), name)
        gone = {number for number, record in _by_line(path, text).items() if record.name == found}
        lines = enumerate(text.splitlines(keepends=True), start=1)
        write_private_file(path, "".join(line for number, line in lines if number not in gone))
        return found


def _called(path: Path, records: Sequence[KeyRecord], name: str) -> str:
    if any(record.name == name for record in records):
        return name
    found = [
        record.name
        for record in records
        if not record.is_named and len(name) > _SHORTEST and own_name(record.digest, 64).startswith(name)
    ]
    if len(found) > 1:
        raise MeshError(
            f"{name} is ambiguous: it matches {', '.join(found)} in {path}: give more of its digits"
        )
    if not found:
        raise MeshError(f"{path} has no key {name}: `mesh keys list` shows its keys")
    return found[0]


def _by_line(path: Path, text: str) -> dict[int, KeyRecord]:
    """The key of each line that holds one, by the line's number, from 1."""
    records: dict[int, KeyRecord] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = parse_key_line(line)
        except MeshError as error:
            raise MeshError(f"line {number} of the API key file {path} {error.message}") from None
        if record is not None:
            records[number] = record
    names = _own_names({record.digest for record in records.values() if not record.is_named})
    return {
        number: record if record.is_named else replace(record, name=names[record.digest])
        for number, record in records.items()
    }


def _own_names(digests: Collection[bytes]) -> dict[bytes, str]:
    """Display names of keys without a name: longer than usual where two digests begin alike."""
    names = {digest: own_name(digest) for digest in digests}
    num_digits = OWN_NAME_DIGITS
    while len(set(names.values())) < len(names):
        num_digits += 1
        counts = Counter(names.values())
        for digest, name in names.items():
            if counts[name] > 1:
                names[digest] = own_name(digest, num_digits)
    return names


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise MeshError(f"the API key file {path} is larger than {_MAX_BYTES} bytes: is it a key file?")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise MeshError(f"the API key file {path} cannot be read: {reason}") from error


@contextmanager
def _editing(path: Path) -> Iterator[None]:
    """Lock for one editor at a time. The lock is on the folder, since the file itself is replaced."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)
    except OSError as error:
        raise MeshError(f"the API key file {path} cannot be written: {error.strerror}") from error


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return _Stamp(found.st_ino, found.st_mtime_ns, found.st_size)
