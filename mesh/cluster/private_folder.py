"""A folder in `/tmp` for this user and this process only, which does not outlive it for long."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

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
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        self.lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
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
        """
        folder = cls.__new__(cls)
        folder.path = path
        folder.lock = os.open(path / _LOCK, os.O_RDWR)
        return folder


def _remove_if_abandoned(path: Path) -> None:
    # Not ours, not there any more, or in use: none of it is our business.
    with contextlib.suppress(OSError):
        lock = os.open(path / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
