"""A server on a lab host, from its start to its first healthy answer."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mesh.lab.hosts import Lab

_POLL_S: Final = 0.2
_LAST_LINES: Final = 15
_MAX_SHOWN_CHARS: Final = 200
_GET: Final = """
import sys, urllib.request
headers = {"Authorization": f"Bearer {key}" for key in sys.argv[2:]}
request = urllib.request.Request(sys.argv[1], headers=headers)
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""
_UNTIL_HEALTHY: Final = """
import sys, time, urllib.request
while True:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=2)
    except OSError:
        time.sleep(float(sys.argv[2]))
    else:
        break
"""


def start_logged(
    lab: Lab, host: int, argv: Sequence[str], log: Path, *, is_again: bool = False
) -> subprocess.Popen[bytes]:
    """Start a program on a host with all its output in a file; `is_again` keeps what the file holds."""
    with log.open("ab" if is_again else "wb") as output:
        return lab.run(host, argv, stdout=output, stderr=output)


def wait_healthy(
    lab: Lab, host: int, port: int, process: subprocess.Popen[bytes], log: Path, *, timeout_s: float = 120.0
) -> None:
    """Wait until `/health` on the host's loopback answers 200.

    Raises:
        MeshError: If the process ends first or takes too long; the message ends with its last words.
    """
    # One process that asks again and again: a new Python for each try would take a fifth of a core from the
    # server that is waited for.
    watcher = lab.run(host, [sys.executable, "-S", "-c", _UNTIL_HEALTHY, str(port), str(_POLL_S)])
    try:
        _wait(lambda: watcher.poll() == 0, host, process, log, timeout_s)
    finally:
        watcher.kill()
        watcher.wait()


def wait_listening(
    lab: Lab, host: int, port: int, process: subprocess.Popen[bytes], log: Path, *, timeout_s: float = 20.0
) -> None:
    """Wait until somebody listens on a host's port, without a connection: not every server likes to be tried.

    Raises:
        MeshError: Like `wait_healthy`.
    """
    _wait(lambda: _is_listening(lab, host, port), host, process, log, timeout_s)


def get_json(lab: Lab, host: int, port: int, path: str, *, api_key: str | None = None) -> Any:
    """What a server on the host's loopback answers to a GET.

    Raises:
        MeshError: If it does not answer with JSON.
    """
    text = get_text(lab, host, port, path, api_key=api_key)
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise MeshError(f"host{host} does not answer {path} with JSON: {text[:_MAX_SHOWN_CHARS]}") from None


def get_text(lab: Lab, host: int, port: int, path: str, *, api_key: str | None = None) -> str:
    """The same, as it comes.

    Raises:
        MeshError: If it does not answer.
    """
    argv = [sys.executable, "-S", "-c", _GET, f"http://127.0.0.1:{port}{path}"]
    done = lab.exec(host, argv if api_key is None else [*argv, api_key])
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [done.stdout])[-1]
        raise MeshError(f"host{host} does not answer {path}: {words}")
    return done.stdout


def last_lines(log: Path, num_lines: int = _LAST_LINES) -> str:
    """The end of a log, for a message."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])


def _wait(
    is_ready: Callable[[], bool], host: int, process: subprocess.Popen[bytes], log: Path, timeout_s: float
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_ready():
        if process.poll() is not None:
            raise MeshError(f"host{host}'s server ended with code {process.returncode}:\n{last_lines(log)}")
        if time.monotonic() > deadline_s:
            raise MeshError(f"host{host}'s server is not ready after {timeout_s:g} s:\n{last_lines(log)}")
        time.sleep(_POLL_S)


def _is_listening(lab: Lab, host: int, port: int) -> bool:
    table = lab.exec(host, ["cat", "/proc/net/tcp"]).stdout.splitlines()[1:]
    # Second column: local address in hexadecimal; fourth: state, of which 0A is LISTEN.
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in map(str.split, table))
