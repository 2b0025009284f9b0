"""The file of API keys: read as a whole, edited one line at a time."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mesh.api.key_line import KeyRecord, check_key_name, format_key_line, parse_key_line
from mesh.private_file import write_private_file
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_BYTES: Final = 4 * 2**20


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
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = parse_key_line(line, number)
        except MeshError as error:
            raise MeshError(f"line {number} of the API key file {path} {error.message}") from None
        if record is None:
            continue
        if record.name in records:
            raise MeshError(f"line {number} of the API key file {path} names {record.name} a second time")
        records[record.name] = record
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


def remove_key(path: Path, name: str) -> None:
    """Remove a key; every other line stays as it is.

    Raises:
        MeshError: If there is no key of that name, or the file cannot be read or written.
    """
    with _editing(path):
        text = _read(path)
        parse_key_file(path, text)
        lines = text.splitlines(keepends=True)
        kept = [line for number, line in enumerate(lines, start=1) if _name_of(line, number) != name]
        if len(kept) == len(lines):
            raise MeshError(f"{path} has no key {name}: `mesh keys list` shows those that there are")
        write_private_file(path, "".join(kept))


def _name_of(line: str, number: int) -> str | None:
    record = parse_key_line(line, number)
    return None if record is None else record.name


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
