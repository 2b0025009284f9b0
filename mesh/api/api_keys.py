"""Who may use the API: the keys of a file, as it is now."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import structlog

from mesh.api.key_file import read_key_file
from mesh.api.key_line import KeyRecord, digest_of
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

log = structlog.get_logger()


@dataclass(frozen=True)
class _Stamp:
    """What tells one content of a file from another without reading it."""

    inode: int
    mtime_ns: int
    num_bytes: int


class ApiKeys:
    """The keys that may use the API; only their hashes are kept.

    Args:
        records: At least one.
        path: The file that they came from, if it is to be looked at again before each request.

    Raises:
        MeshError: If there is no key: a server that nobody can use is a mistake.
    """

    def __init__(self, records: Sequence[KeyRecord], path: Path | None = None) -> None:
        if not records:
            where = "the server" if path is None else f"the API key file {path}"
            raise MeshError(f"{where} holds no key: make one with `mesh keys add NAME`")
        self._records = tuple(records)
        # Of the records last read: of a file that cannot be read for a while no key counts as removed.
        self._identities = _identities(records)
        self._listeners: list[Callable[[Collection[str]], None]] = []
        self._path = path
        self._stamp = None if path is None else _stamp(path)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """The keys of a file of `mesh keys`; who is added or removed later counts from the next request on.

        A file that is gone, or cannot be read any more, lets nobody in until it can be read again.

        Raises:
            MeshError: If the file cannot be read, is malformed, or holds no key.
        """
        keys = cls(read_key_file(path), path)
        if any(record.is_plain for record in keys._records) and path.stat().st_mode & 0o077:
            log.warning("api_keys_readable_by_others", path=str(path), remedy="chmod 600")
        return keys

    @classmethod
    def from_plain(cls, keys: Mapping[str, str]) -> Self:
        """Keys by their names, without limits."""
        return cls([KeyRecord(name, digest_of(key)) for name, key in keys.items()])

    def on_removed(self, listener: Callable[[Collection[str]], None]) -> None:
        """Have a function called with the identities of keys that were removed from the file."""
        self._listeners.append(listener)

    def find(self, key: str) -> KeyRecord | None:
        """The record of a key, or None if it is not one of ours. Takes equally long whichever it is."""
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
            log.error("api_keys_unreadable", reason=error.message, effect="nobody is let in")  # noqa: TRY400
        else:
            log.info("api_keys_changed", names=[record.name for record in records])
            self._records, before = records, self._identities
            self._identities = _identities(records)
            if removed := before - self._identities:
                for listener in self._listeners:
                    listener(removed)


def _identities(records: Sequence[KeyRecord]) -> frozenset[str]:
    return frozenset(record.identity for record in records)


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return _Stamp(found.st_ino, found.st_mtime_ns, found.st_size)
