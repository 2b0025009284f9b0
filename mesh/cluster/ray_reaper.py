"""Child process that supervises Ray's daemons and ends them.

`ray start --block` does the same with all of Ray imported, in 80 MB on every host. This needs a tenth: it is
the reaper of its descendants (prctl(2), PR_SET_CHILD_SUBREAPER), so that Ray's processes become its children
when the command that started them has ended.

A node may outlive its owner for a while. The owner holds a lock on a file, which the kernel releases when the
owner ends; a process that takes the lock in time is the new owner.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PR_SET_CHILD_SUBREAPER: Final = 36
_SIGNALS: Final = (signal.SIGTERM, signal.SIGCHLD)
_GRACE_S: Final = 2.0
# Interval of the checks of the node's ownership.
_POLL_S: Final = 0.5


class Ownership:
    """Whether the node has an owner, or had one recently.

    Args:
        path: File that the owner locks. It is opened once: a program that removes old files from temporary
            folders takes its name away, and no lock.
        linger_s: Longest time without an owner, in seconds.

    Raises:
        OSError: If it cannot be opened.
    """

    def __init__(self, path: Path, linger_s: float) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self._linger_s = linger_s
        self._ownerless_since_s: float | None = None

    def is_over(self, now_s: float) -> bool:
        """Whether the node has been without an owner for too long, as seen at regular checks.

        Args:
            now_s: Monotonic clock, seconds.
        """
        if is_locked(self._descriptor):
            self._ownerless_since_s = None
            return False
        if self._ownerless_since_s is None:
            self._ownerless_since_s = now_s
        return now_s - self._ownerless_since_s >= self._linger_s


def is_locked(descriptor: int) -> bool:
    """Whether another process holds a lock on an open file; also if the system does not tell."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def keep(command: Sequence[str], needed: str, ownership: Ownership | None = None) -> int:
    """Run a command that leaves daemons behind; return when one of them has ended, or on SIGTERM.

    All descendants of this process have been ended then.

    Args:
        command: Program and arguments. Its daemons run when it ends.
        needed: Name of a daemon among them; one that ended before the command leaves no other trace.
        ownership: Ends it as well; without, only SIGTERM does.

    Returns:
        The command's exit status if it failed; 0 after SIGTERM; 1 if a daemon ended by itself.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Received with sigwait below, so that none comes between two checks. The command itself gets them
    # unblocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    starter = os.posix_spawn(command[0], list(command), os.environ, setsigmask=())
    try:
        return _watch(starter, needed, ownership)
    finally:
        _end_all()


def _watch(starter: int, needed: str, ownership: Ownership | None) -> int:
    daemons: set[int] = set()
    while True:
        heard = signal.sigtimedwait(_SIGNALS, _POLL_S)
        if heard is not None and heard.si_signo == signal.SIGTERM:
            return 0
        if ownership is not None and ownership.is_over(time.monotonic()):
            print("the Ray node has had no owner for too long", flush=True)  # noqa: T201
            return 0
        # One SIGCHLD may stand for several.
        for pid, status in _ended():
            if pid == starter:
                if status:
                    return status
                daemons = set(_children())
                if needed not in map(_name, daemons):
                    print(f"{needed} of the Ray node ended while it started", flush=True)  # noqa: T201
                    return 1
            elif pid in daemons:
                print(f"process {pid} of the Ray node ended with status {status}", flush=True)  # noqa: T201
                return 1


def _ended() -> Iterator[tuple[int, int]]:
    """Children that have ended, with exit status, negative for a signal; each is reaped when yielded."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _let_go() -> None:
    for _ in _ended():
        pass


def _children() -> list[int]:
    """Ids of this process's children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                # The name in brackets may contain any character; state and parent follow it.
                parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            except OSError:
                continue
            if int(parent) == os.getpid():
                found.append(int(entry.name))
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def _end_all() -> None:
    """End every descendant: those that lose their parent become children in turn."""
    deadline_s = time.monotonic() + _GRACE_S
    _signal_children(signal.SIGTERM)
    while _children() and (left_s := deadline_s - time.monotonic()) > 0:
        signal.sigtimedwait((signal.SIGCHLD,), left_s)
        _let_go()
    while _children():
        _signal_children(signal.SIGKILL)
        signal.sigtimedwait((signal.SIGCHLD,), _GRACE_S)
        _let_go()


def _signal_children(number: signal.Signals) -> None:
    for pid in _children():
        # Unreaped children of this process, so the id cannot belong to another process.
        os.kill(pid, number)


def main() -> None:
    """`python -m mesh.cluster.ray_reaper DAEMON COMMAND…`."""
    sys.exit(keep(sys.argv[2:], sys.argv[1]))


if __name__ == "__main__":
    main()
