"""Child process that runs `ray start` and ends with its parent.

Setting this up between fork and exec would run Python code in a forked process with threads, which may hang.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

from mesh.cluster.ray_environment import LINGER_S, OWNER_PATH, PARENT_PID
from mesh.cluster.ray_reaper import Ownership, keep
from mesh.util.child_environment import module_command

_PR_SET_PDEATHSIG: Final = 1
_POLL_S: Final = 0.5


def die_with_parent(parent_pid: int) -> None:
    """End this process by SIGTERM when its parent ends: at once on Linux, within a second elsewhere.

    Args:
        parent_pid: Process id of the parent; if it has ended already, this process exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    else:
        threading.Thread(target=_watch, args=(parent_pid,), name="parent", daemon=True).start()
    if os.getppid() != parent_pid:
        sys.exit(1)


def _watch(parent_pid: int) -> None:
    """Without a kernel that tells: an orphan gets another parent."""
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Start a Ray node with the arguments of `ray start`, and stay until it ends."""
    linger_s = float(os.environ[LINGER_S])
    if not linger_s:
        die_with_parent(int(os.environ[PARENT_PID]))
    arguments = sys.argv[1:]
    if sys.platform == "linux":
        ownership = Ownership(Path(os.environ[OWNER_PATH]), linger_s)
        sys.exit(keep(module_command("ray.scripts.scripts", *arguments), "raylet", ownership))
    from ray.scripts.scripts import main as ray_main  # noqa: PLC0415 - the parent may die while Ray is imported

    sys.argv[1:] = [*arguments, "--block"]
    ray_main()


if __name__ == "__main__":
    main()
