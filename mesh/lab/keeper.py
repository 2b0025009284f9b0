"""The first process of a host: holds its namespaces open until the lab lets go of standard input.

It is process 1 of the host's process namespace, so when it ends, whatever way the lab itself ended, the
kernel ends every process of the host and takes its network, mounts and shared memory with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

# Under /dev/shm, which is the host's own anyway: no mount point needs to be made on the real disk.
HOME = Path("/dev/shm/home")  # noqa: S108 - the private one, mounted below
TMPDIR = Path("/dev/shm/tmp")  # noqa: S108 - as above


def main() -> None:
    """Give the host its own /proc and /dev/shm, tell the lab this process's id out there, and wait."""
    pid_outside = Path("/proc/self").readlink()  # /proc is still the outer one here
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)  # noqa: S108 - as above
    HOME.mkdir()
    TMPDIR.mkdir()
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # orphans come to process 1; ignored, they are reaped at once
    os.write(sys.stdout.fileno(), f"{pid_outside}\n".encode())
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
