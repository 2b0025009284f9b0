"""Local mesh: `mesh serve` on this machine, without the lab."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psutil

from mesh.api.api_keys import KeyRecord, add_key, digest_of
from mesh.cli.own_mesh import own_mesh
from meshbench.lab.memory_watch import role_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Sequence
    from pathlib import Path

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
    keys, log = folder / "api-keys", folder / "mesh-serve.log"
    keys.unlink(missing_ok=True)
    add_key(keys, KeyRecord("bench", digest_of(key), max_concurrent=_ANSWERS_AT_ONCE))
    for number, other in enumerate(other_keys):
        add_key(keys, KeyRecord(f"other-{number}", digest_of(other)))
    arguments = [str(model), "--api-key-file", str(keys), *options]
    try:
        with log.open("w+b") as output, own_mesh(arguments, output, what="the mesh to be tested") as mesh:
            yield ServedMesh(mesh.port, log, mesh.process)
    finally:
        keys.unlink(missing_ok=True)
