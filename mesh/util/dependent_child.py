"""Child processes that end with their parent, however it ends.

Run as a program: the parent's process id, then a module, which is run as a program, and its arguments.
Setting this up between fork and exec would run Python code in a forked process with threads, which may hang.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from typing import Final, Self

from mesh.util.child_environment import inherited_environment, module_command

_PR_SET_PDEATHSIG: Final = 1
_POLL_S: Final = 0.5


class _InterruptLater:
    """Holds Ctrl-C back while a process is started: raised there, it would leave one that nobody knows."""

    def __init__(self) -> None:
        self._is_holding = False
        self._has_come = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._hold)
            self._is_holding = True
        return self

    def __exit__(self, *_exception: object) -> None:
        self.now()

    def now(self) -> None:
        """Raise it from now on, and at once if it has come."""
        if self._is_holding:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_holding = False
        if self._has_come:
            self._has_come = False
            raise KeyboardInterrupt

    def _hold(self, *_received: object) -> None:
        self._has_come = True


def run_dependent(module: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a module as a program, and wait for its end; whatever is raised, it has ended then.

    On Linux it ends with the thread that calls this, too.

    Args:
        module: Dotted name of the module.
        arguments: Of its command line.
        timeout_s: Longest wait.

    Returns:
        Its exit code, and what it wrote.

    Raises:
        OSError: If no process can be started.
        TimeoutExpired: If it takes longer.
    """
    command = module_command("mesh.util.dependent_child", str(os.getpid()), module, *arguments)
    with (
        _InterruptLater() as interrupt,
        subprocess.Popen(
            command,
            env=inherited_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            interrupt.now()
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            process.wait()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


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
    """Run the module that the arguments name."""
    _, parent_pid, module, *arguments = sys.argv
    die_with_parent(int(parent_pid))
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
