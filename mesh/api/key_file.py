"""The file of API keys: read as a whole, edited one line at a time."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mesh.api.key_line import (
    OWN_NAME_DIGITS,
    KeyRecord,
    check_key_name,
    format_key_line,
    own_name,
    parse_key_line,
)
from mesh.util.files import write_private_file
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_MAX_BYTES: Final = 4 * 2**20
# `key-` alone names no key, though every key without a name begins so.
_SHORTEST: Final = len("key-")


def default_key_file() -> Path:
    """`$XDG_CONFIG_HOME/spanmesh/api-keys`, or `~/.config/spanmesh/api-keys`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "spanmesh" / "api-keys"


def read_key_file(path: Path) -> tuple[KeyRecord, ...]:
    """All keys, in the file's order; there may be none.

    Raises:
        MeshError: If it cannot be read, or naming the line that is wrong.
    """
    return parse_key_file(path, _read(path))


def parse_key_file(path: Path, text: str) -> tuple[KeyRecord, ...]:
    """All keys of a file's text.

    Args:
        path: For errors.
        text: The file's.

    Raises:
        MeshError: Naming the line that is wrong.
    """
    records: dict[str, KeyRecord] = {}
    for number, record in _by_line(path, text).items():
        known = records.setdefault(record.name, record)
        # The same key without a name once more changes nothing.
        if known is not record and (known.is_named or record.is_named):
            raise MeshError(f"line {number} of the API key file {path} names {record.name} a second time")
    return tuple(records.values())


def add_key(path: Path, record: KeyRecord) -> None:
    """Add a key at the end; the file and its folder are made if they are missing.

    Raises:
        MeshError: If there is a key of that name, or the file cannot be read or written.
    """
    check_key_name(record.name)
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
        name: The key's, or as many digits of the name of one without a name as tell it from the others.

    Returns:
        The whole name.

    Raises:
        MeshError: If there is no key of that name, or several, or the file cannot be read or written.
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
        raise MeshError(f"{name} may be each of {', '.join(found)} in {path}: give more of its digits")
    if not found:
        raise MeshError(f"{path} has no key {name}: `mesh keys list` shows those that there are")
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
    """Names of keys without one: longer than usual where two digests begin alike."""
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
    """One editor at a time. The folder is what they lock: the file itself is replaced."""
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
