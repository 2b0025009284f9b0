"""A disk that is full."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spanmesh_proto.errors import ModelError
from stages.files import Region, require_disk, write_error
from stages.layers import LayerRange
from stages.weights.disk_cache import StageStore
from stages.weights.fetch import FetchSource, fetch_stage
from stages.weights.recipe import PIECE_BYTES, Recipe, RecipeTensor
from tests.support.lab_fixtures import require_lab

# A disk of one megabyte that nobody else sees: a temporary file system in a mount namespace of its own.
ON_A_SMALL_DISK = """
import sys
from pathlib import Path
from spanmesh_proto.errors import ModelError
from stages.files import atomic_write
try:
    with atomic_write(Path(sys.argv[1]) / "stage.gguf") as file:
        for _ in range(64):
            file.write(bytes(2**16))
except ModelError as error:
    print(error.message)
print([path.name for path in Path(sys.argv[1]).iterdir()])
"""


def test_what_cannot_fit_is_not_begun(tmp_path: Path) -> None:
    require_disk(tmp_path / "stage.gguf", 1)
    with pytest.raises(
        ModelError, match=r"stage.gguf: the disk is full: 1073741824.0 GiB are needed, .* are free"
    ):
        require_disk(tmp_path / "stage.gguf", 2**60)


def test_a_disk_that_fills_up_is_told_apart_from_other_failures(tmp_path: Path) -> None:
    full = write_error(tmp_path / "x", OSError(errno.ENOSPC, "No space left on device"), 2**20)
    assert "the disk is full: 1.0 MiB are needed" in full.message
    denied = write_error(tmp_path / "x", PermissionError(errno.EACCES, "Permission denied"))
    assert denied.message == f"cannot write {tmp_path / 'x'}: Permission denied"


async def test_a_stage_too_large_for_the_disk_is_not_fetched(tmp_path: Path) -> None:
    # Nobody listens there: it must not come so far.
    source = FetchSource("127.0.0.1:1", b"", "secret")
    num_bytes = 2**40
    hashes = ("ab" * 32,) * (num_bytes // PIECE_BYTES)
    huge = Recipe(
        "x",
        LayerRange(0, 1),
        2,
        32,
        b"",
        (RecipeTensor(num_bytes, "blk.0", Region(0, 0, num_bytes), hashes),),
    )
    store = StageStore(tmp_path)
    store.keep(huge)
    with pytest.raises(ModelError, match="the disk is full"):
        await fetch_stage(store, huge.sha256, source)


def test_a_write_that_meets_the_end_of_the_disk_leaves_nothing(tmp_path: Path) -> None:
    require_lab()
    script = tmp_path / "write.py"
    script.write_text(ON_A_SMALL_DISK)
    small = tmp_path / "small"
    small.mkdir()
    mounted = f"mount -t tmpfs -o size=1m none {small} && exec {sys.executable} {script} {small}"
    done = subprocess.run(
        [str(shutil.which("unshare")), "--mount", "sh", "-c", mounted],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    message, left = done.stdout.splitlines()
    assert message.startswith(f"cannot write {small}/stage.gguf: the disk is full: ")
    assert left == "[]"
