"""Files that are written whole or not at all, and locks of files.

Folders of this user for files of spanmesh: cache, configuration and state.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def whole_file(path: Path, *, is_private: bool = False, is_durable: bool = True) -> Iterator[BinaryIO]:
    """A file that gets its name at the end of the block; on any exception, Ctrl-C included, it is removed.

    A reader sees the old content or the new, never a part.

    Args:
        path: Replaced if it exists.
        is_private: Whether only this user may read it.
        is_durable: Whether it survives a power cut from the end of the block on.

    Raises:
        OSError: If the folder cannot be written to, or its disk is full.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    mode = 0o600 if is_private else 0o666

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    with open(partial, "xb", opener=opener) as file:
        try:
            yield file
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            # On a full disk the rest would take the room that the next attempt needs.
            partial.unlink(missing_ok=True)
            raise
    if is_durable:
        sync(path.parent)


def write_private_file(path: Path, text: str) -> None:
    """Write a file that only this user may read, in one step; the target of a link is replaced.

    Raises:
        OSError: If the folder cannot be written to.
    """
    with whole_file(path.resolve(), is_private=True) as file:
        file.write(text.encode())


def sync(path: Path) -> None:
    """Make the content of a file durable, or renames in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file against other descriptors, until this one is closed; returns whether it was free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def locked(path: Path) -> int:
    """Lock a file, for this process and as long as its descriptor is open.

    Args:
        path: The lock, not what it guards, which is replaced when it is written; made if it is missing.

    Returns:
        Its descriptor.

    Raises:
        BlockingIOError: If another descriptor holds the lock.
        OSError: If the file cannot be made or opened.
    """
    lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def user_folder(variable: str, *below_home: str) -> Path:
    """A folder of the XDG base directories, `spanmesh` in it left out.

    Args:
        variable: Variable that names it, such as `XDG_CACHE_HOME`.
        below_home: Names of the folders that lead to it from the home directory, without the variable.

    Raises:
        ClusterError: If neither the variable nor a home directory is known, as for a user of a container that
            its list of users lacks.
    """
    named = os.environ.get(variable)
    if named:
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    # A relative HOME would put the files wherever this was started.
    if not home.is_absolute():
        raise ClusterError(
            f"user {os.geteuid()} has no home directory, and {variable} is not set: set HOME or {variable} "
            "to a folder that this user may write to"
        )
    return home.joinpath(*below_home)
