"""A folder in `/tmp` for this user and this process only, which does not outlive it for long."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from spanmesh_proto.errors import ClusterError

_LOCK: Final = "lock"


class PrivateFolder:
    """Removed by `close`, or, if its owner was killed, by the next one that is made.

    Its owner holds a lock in it, which the kernel gives up with the owner; unlike a process id that says the
    truth among containers as well.

    Args:
        prefix: Of its name.

    Attributes:
        path: The folder.
        lock: Descriptor of the lock; a child that inherits it owns the folder as well.
    """

    def __init__(self, prefix: str) -> None:
        # Sockets are to go into it, and their paths end at 107 characters: no long TMPDIR.
        root = Path("/tmp")  # noqa: S108 - mkdtemp makes a folder that nobody else can enter
        if not root.is_dir():
            root = Path(tempfile.gettempdir())
        for left in root.glob(f"{prefix}*"):
            _remove_if_abandoned(left)
        # Made with mode 0700, or not at all if there is anything of that name.
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        self.lock = _open_lock(self.path, os.O_CREAT | os.O_EXCL)
        fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Remove the folder and all that is in it."""
        if self.lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1

    @classmethod
    def of_another(cls, path: Path) -> PrivateFolder:
        """A folder that another process still locks, to be removed by this one.

        Args:
            path: The folder.

        Raises:
            OSError: If it is gone.
            ClusterError: If it is not private to this user.
        """
        folder = cls.__new__(cls)
        folder.path = path
        folder.lock = _open_lock(path)
        return folder


def _remove_if_abandoned(path: Path) -> None:
    # Not ours, not there any more, or in use: none of it is our business.
    with contextlib.suppress(OSError, ClusterError):
        lock = _open_lock(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _open_lock(path: Path, flags: int = 0) -> int:
    """The lock of a folder, without following any link: anybody may put what they like into `/tmp`.

    Args:
        path: The folder.
        flags: To open it with, besides.

    Returns:
        A descriptor to read and write.

    Raises:
        OSError: If one of the two is not there, or a link.
        ClusterError: If others have made the folder, or may enter it, or the lock is no file.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ClusterError(
                f"{path} is not private to this user (it is user {found.st_uid}'s, with mode "
                f"{stat.S_IMODE(found.st_mode):o}): remove it"
            )
        # Opening a pipe would wait for its other end.
        lock = os.open(_LOCK, flags | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise ClusterError(f"{path / _LOCK} is no regular file: remove {path}")
    return lock
