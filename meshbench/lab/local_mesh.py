"""Local mesh: `mesh serve` on this machine, without the lab."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib import request

import psutil

from mesh.api.api_keys import KeyRecord, add_key, digest_of
from mesh.cluster.addresses import free_port
from meshbench.lab.memory_watch import role_of
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_START_S: Final = 180.0
_STOP_S: Final = 30.0
_POLL_S: Final = 0.2
_ASK_S: Final = 5.0
_LAST_LINES: Final = 15
# Benchmarks use one key for many concurrent answers.
_ANSWERS_AT_ONCE: Final = 1000


@dataclass(frozen=True)
class ServedMesh:
    """A running mesh."""

    port: int
    """Port of its API on 127.0.0.1."""
    log: Path
    """File with its log."""
    process: subprocess.Popen[bytes]
    """Process of `mesh serve`."""

    def is_running(self) -> bool:
        """Whether the process of the API runs."""
        return self.process.poll() is None

    def own_bytes(self) -> int:
        """Private memory of the coordinator and the stage."""
        total = 0
        parent = psutil.Process(self.process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            # A process may end during the measurement.
            try:
                if role_of(process.cmdline()) in {"coordinator", "stage"}:
                    total += process.memory_full_info().uss
            except psutil.Error:
                continue
        return total


@contextmanager
def served_mesh(
    model: Path, folder: Path, key: str, options: Sequence[str], other_keys: Sequence[str] = ()
) -> Iterator[ServedMesh]:
    """Run a mesh for the block.

    Args:
        model: A GGUF file.
        folder: Folder for its log and its file of API keys.
        key: The API key that opens it.
        options: Further options of `mesh serve`.
        other_keys: Further API keys, with the limits of any key.

    Raises:
        MeshError: If it does not start; with the end of its output.
    """
    port = free_port("127.0.0.1")
    keys, log = folder / "api-keys", folder / "mesh-serve.log"
    keys.unlink(missing_ok=True)
    add_key(keys, KeyRecord("bench", digest_of(key), max_concurrent=_ANSWERS_AT_ONCE))
    for number, other in enumerate(other_keys):
        add_key(keys, KeyRecord(f"other-{number}", digest_of(other)))
    command = [str(Path(sys.executable).with_name("mesh")), "serve", str(model)]
    where = ["--port", str(port), "--advertise", "127.0.0.1", "--api-key-file", str(keys)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *where, *options], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        deadline_s = time.monotonic() + _START_S
        while not _is_healthy(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                words = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
                raise MeshError(f"the mesh to be tested does not come up:\n{words}")
            time.sleep(_POLL_S)
        yield ServedMesh(port, log, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        keys.unlink(missing_ok=True)


def _is_healthy(port: int) -> bool:
    opener = request.build_opener(request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=_ASK_S):
            return True
    except OSError:
        return False
