"""How much memory cutting and hashing take, and how fast they are against a plain copy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mesh.bench.weights.sparse_model import sparse_layout, write_sparse
from spanmesh_proto.errors import MeshError
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from pathlib import Path

MOST_RSS_BYTES: Final = 200_000_000
_EVERY_BYTES: Final = 16 * 1024 * 1024
_MARK_BYTES: Final = 16 * 1024


@dataclass(frozen=True)
class ChildRun:
    """What a process of `mesh.bench.weights.child` took.

    Attributes:
        seconds: Without starting Python.
        peak_rss_bytes: The most memory that it had.
    """

    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True)
class CuttingReport:
    """What came of it.

    Attributes:
        file_bytes: Of the model.
        data_bytes: Of that, what is no hole.
        num_layers: Layers of the model.
        cut: Of all layers but the first: nearly all of the file.
        hashed: Of the same layers.
        is_equal: Whether the stage has the model's bytes where the model has any.
        dense_bytes: Of a model without holes.
        dense_cut_s: Cutting that, until it is on the disk.
        dense_copy_s: Copying its file, until it is on the disk.
    """

    file_bytes: int
    data_bytes: int
    num_layers: int
    cut: ChildRun
    hashed: ChildRun
    is_equal: bool
    dense_bytes: int
    dense_cut_s: float
    dense_copy_s: float

    @property
    def passed(self) -> bool:
        """Whether memory stayed constant, and no byte was lost."""
        return self.is_equal and max(self.cut.peak_rss_bytes, self.hashed.peak_rss_bytes) <= MOST_RSS_BYTES


def run_child(*arguments: str) -> ChildRun:
    """Run `mesh.bench.weights.child` to its end.

    Raises:
        MeshError: If it fails.
    """
    argv = [sys.executable, "-m", "mesh.bench.weights.child", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeshError(f"{' '.join(argv[2:4])} failed: {done.stderr.strip()[-500:]}")
    return ChildRun(**json.loads(done.stdout.splitlines()[-1]))


def measure_cutting(folder: Path, size_bytes: int, dense_bytes: int, seed: int) -> CuttingReport:
    """Make a sparse model and a dense one, cut both, and clean up the stages.

    Args:
        folder: Where; `model.gguf`, the sparse one, stays there.
        size_bytes: Of the sparse one.
        dense_bytes: Of the dense one.
        seed: Of what is in them.
    """
    model, stage = folder / "model.gguf", folder / "stage.gguf"
    layout = sparse_layout(size_bytes)
    data_bytes = write_sparse(model, layout, every_bytes=_EVERY_BYTES, mark_bytes=_MARK_BYTES, seed=seed)
    facts = read_model_facts(model)
    layers = ("1", str(facts.n_layers))
    cut = run_child("cut", str(model), *layers, str(stage))
    is_equal = _has_same_data(model, stage)
    stage.unlink()
    hashed = run_child("hash", str(model), *layers, str(folder / "cache"))
    dense_copy_s, dense_cut_s = _dense(folder, dense_bytes, seed)
    return CuttingReport(
        facts.file_bytes,
        data_bytes,
        facts.n_layers,
        cut,
        hashed,
        is_equal,
        dense_bytes,
        dense_cut_s,
        dense_copy_s,
    )


def _dense(folder: Path, dense_bytes: int, seed: int) -> tuple[float, float]:
    """Seconds of a copy and of a cut of the same file, each until it is on the disk; the better of two."""
    model, output = folder / "dense.gguf", folder / "dense-stage.gguf"
    write_sparse(
        model, sparse_layout(dense_bytes), every_bytes=_EVERY_BYTES, mark_bytes=_EVERY_BYTES, seed=seed
    )
    n_layers = read_model_facts(model).n_layers
    copies, cuts = [], []
    for _ in range(2):
        before_s = time.monotonic()
        shutil.copyfile(model, output)
        _sync(output)
        copies.append(time.monotonic() - before_s)
        output.unlink()
        cuts.append(run_child("cut", str(model), "0", str(n_layers), str(output)).seconds)
        output.unlink()
    model.unlink()
    return min(copies), min(cuts)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _has_same_data(model: Path, stage: Path) -> bool:
    """Compare every mark of every tensor, by name, read by another program than the one that cuts."""
    from gguf import GGUFReader  # noqa: PLC0415 - slow to import

    whole = {tensor.name: tensor for tensor in GGUFReader(model).tensors}
    num_compared = 0
    for tensor in GGUFReader(stage).tensors:
        if not tensor.name.startswith("blk."):
            continue
        _, layer, kind = tensor.name.split(".", 2)
        other = whole[f"blk.{int(layer) + 1}.{kind}"]
        if tensor.n_bytes != other.n_bytes:
            return False
        ours, theirs = tensor.data.reshape(-1).view("u1"), other.data.reshape(-1).view("u1")
        last = max(0, int(tensor.n_bytes) - _MARK_BYTES)
        for start in {*range(0, int(tensor.n_bytes), _EVERY_BYTES), last}:
            if (ours[start : start + _MARK_BYTES] != theirs[start : start + _MARK_BYTES]).any():
                return False
            num_compared += 1
    return num_compared > 0
