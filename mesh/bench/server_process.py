"""A server on a lab host, from its start to its first healthy answer."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.lab import Lab

_POLL_S: Final = 0.2
_LAST_LINES: Final = 15


def start_logged(lab: Lab, host: int, argv: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a program on a host with all its output in a file."""
    with log.open("wb") as output:
        return lab.run(host, argv, stdout=output, stderr=output)


def wait_healthy(
    lab: Lab, host: int, port: int, process: subprocess.Popen[bytes], log: Path, *, timeout_s: float = 120.0
) -> None:
    """Wait until `/health` on the host's loopback answers 200.

    Raises:
        MeshError: If the process ends first or takes too long; the message ends with its last words.
    """
    deadline_s = time.monotonic() + timeout_s
    while not _is_healthy(lab, host, port):
        if process.poll() is not None:
            raise MeshError(
                f"the server on host{host} ended with code {process.returncode}:\n{last_lines(log)}"
            )
        if time.monotonic() > deadline_s:
            raise MeshError(
                f"the server on host{host} is not ready after {timeout_s:g} s:\n{last_lines(log)}"
            )
        time.sleep(_POLL_S)


def last_lines(log: Path) -> str:
    """The end of a log, for a message."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:])


def _is_healthy(lab: Lab, host: int, port: int) -> bool:
    script = (
        "import sys, urllib.request as u\n"
        "try: u.urlopen(f'http://127.0.0.1:{sys.argv[1]}/health', timeout=2)\n"
        "except OSError: sys.exit(1)"
    )
    return lab.exec(host, [sys.executable, "-S", "-c", script, str(port)]).returncode == 0
