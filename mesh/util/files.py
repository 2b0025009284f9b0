"""Private files, written atomically, and locks of files."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path


def write_private_file(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old content or the new, never a part.

    Args:
        path: Replaced if it exists; the target of a link is replaced.
        text: The whole content.

    Raises:
        OSError: If the folder cannot be written to.
    """
    path = path.resolve()
    # A temporary file is made with mode 0600; renaming it keeps that.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


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
