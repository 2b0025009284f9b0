"""Child process that is process 1 of an emulated host.

When it ends, in whatever way the lab ended, the kernel ends every process of the host and releases its
network, mounts and files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

TMP = Path("/tmp")  # noqa: S108 - the host's own, mounted below
HOME = TMP / "home"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - as above
# A disk's page cache holds a model file in large pages; with small ones, a memory file system's default,
# computing takes a fifth longer.
_LARGE_PAGES = ("-o", "huge=always") if Path("/sys/kernel/mm/transparent_hugepage").exists() else ()


def main(shared: list[Path]) -> None:
    """Give the host its own /proc, /dev/shm and /tmp, print this process's outer id, and wait.

    Args:
        shared: Directories under /tmp that are to be the machine's own here as well.
    """
    pid_outside = Path("/proc/self").readlink()  # /proc is still the outer one here
    _mount("-t", "proc", "proc", "/proc")
    _mount("-t", "tmpfs", "tmpfs", _SHARED_MEMORY)
    harbours = [_SHARED_MEMORY / f"harbour{index}" for index in range(len(shared))]
    for directory, harbour in zip(shared, harbours, strict=True):
        harbour.mkdir()
        _mount("--bind", directory, harbour)
    _mount("-t", "tmpfs", *_LARGE_PAGES, "tmpfs", TMP)
    for directory, harbour in zip(shared, harbours, strict=True):
        directory.mkdir(parents=True, exist_ok=True)
        _mount("--move", harbour, directory)
        harbour.rmdir()
    HOME.mkdir()
    # Orphans become children of process 1; ignoring SIGCHLD lets the kernel reap them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(sys.stdout.fileno(), f"{pid_outside}\n".encode())
    sys.stdin.buffer.read()


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
