"""Mesh of a command's own: `mesh serve` on loopback, for as long as the command needs it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final
from urllib import request

from mesh.cli.options import arguments_of
from mesh.cluster.addresses import free_port
from mesh.options.host import HeadOptions
from mesh.util.child_environment import inherited_environment, module_command
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_START_S: Final = 180.0
_STOP_S: Final = 30.0
_POLL_S: Final = 0.2
_ASK_S: Final = 5.0
_LAST_LINES: Final = 15


@dataclass(frozen=True)
class OwnMesh:
    """A running mesh."""

    port: int
    """Port of its API on 127.0.0.1."""
    process: subprocess.Popen[bytes]
    """Process of `mesh serve`."""

    @property
    def url(self) -> str:
        """URL of its API, without a path."""
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def own_mesh(arguments: Sequence[str], log: BinaryIO, *, what: str = "the mesh") -> Iterator[OwnMesh]:
    """Run `mesh serve` for the block.

    Args:
        arguments: Of `mesh serve`, apart from its addresses.
        log: File for its output, open for reading as well.
        what: How errors call it.

    Raises:
        MeshError: If it does not start; with the end of its output.
    """
    port = free_port("127.0.0.1")
    where = arguments_of(HeadOptions, port=port, advertise="127.0.0.1")
    # It ends with this process, however that ends: it would record on, and keep the folder locked.
    command = module_command(
        "mesh.util.dependent_child", str(os.getpid()), "mesh", "serve", *arguments, *where
    )
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=inherited_environment()
    )
    mesh = OwnMesh(port, process)
    try:
        deadline_s = time.monotonic() + _START_S
        while not _is_healthy(mesh.url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise MeshError(f"{what} does not come up:\n{_last_lines(log)}")
            time.sleep(_POLL_S)
        yield mesh
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_lines(log: BinaryIO) -> str:
    # Seeking would move the place where the mesh goes on to write.
    output = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0)
    return "\n".join(output.decode(errors="replace").splitlines()[-_LAST_LINES:])


def _is_healthy(url: str) -> bool:
    opener = request.build_opener(request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=_ASK_S):
            return True
    except OSError:
        return False
