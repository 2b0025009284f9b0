"""Fresh start: the command of this process begins anew in its place."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final, NoReturn

import psutil

# On Linux and macOS: the open files of the process that looks.
_OPEN_FILES: Final = Path("/dev/fd")
_KILL_TIMEOUT_S: Final = 5.0


def start_command_anew() -> NoReturn:
    """Replace this process by a new one of the same command, with the same process id for services.

    For what cannot be put in order any more: nothing is closed but files, locks and sockets, as after a
    crash. Child processes are killed. From any thread.
    """
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=_KILL_TIMEOUT_S)
    # Some libraries leave files open for children. Not closed here, since other threads use them to the end.
    for path in _OPEN_FILES.iterdir():
        if int(path.name) > sys.stderr.fileno():
            with contextlib.suppress(OSError):
                os.set_inheritable(int(path.name), False)  # noqa: FBT003 - its only form
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the command of this process
