"""Memory and speed of slicing, measured on sparse models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

from gguf.constants import GGMLQuantizationType

from spanmesh_proto.errors import MeshError
from stages.files import write_all
from stages.gguf import Value, ValueType
from stages.slicing.layout import StageLayout, StageTensor
from stages.slicing.model_facts import read_model_facts
from stages.slicing.stage_writer import encode_header, padded, stage_bytes
from tests.qualification.programs import program_command

if TYPE_CHECKING:
    from pathlib import Path

_ALIGNMENT: Final = 32
_N_VOCAB: Final = 1024
_F16_BYTES: Final = 2
_MOST_LAYER_BYTES: Final = 2 * 2**30
MOST_RSS_BYTES: Final = 200_000_000
_EVERY_BYTES: Final = 16 * 1024 * 1024
_MARK_BYTES: Final = 16 * 1024


@dataclass(frozen=True)
class ChildRun:
    """What a process of `tests.qualification.weights.child` took."""

    seconds: float
    """Without starting Python."""
    peak_rss_bytes: int
    """The most memory that it had."""


@dataclass(frozen=True)
class CuttingReport:
    """What came of it."""

    file_bytes: int
    """Of the model."""
    data_bytes: int
    """Of that, what is no hole."""
    num_layers: int
    """Layers of the model."""
    cut: ChildRun
    """Of all layers but the first: nearly all of the file."""
    hashed: ChildRun
    """Of the same layers."""
    is_equal: bool
    """Whether the stage has the model's bytes where the model has any."""
    dense_bytes: int
    """Of a model without holes."""
    dense_cut_s: float
    """Cutting that, until it is on the disk."""
    dense_copy_s: float
    """Copying its file, until it is on the disk."""

    @property
    def passed(self) -> bool:
        """Whether memory stayed constant, and no byte was lost."""
        return self.is_equal and max(self.cut.peak_rss_bytes, self.hashed.peak_rss_bytes) <= MOST_RSS_BYTES


def sparse_layout(size_bytes: int) -> StageLayout:
    """A llama of about this size in F16.

    Args:
        size_bytes: Of the file; at least 16 MiB.
    """
    n_layers = max(8, -(-size_bytes // _MOST_LAYER_BYTES))
    n_embd = 4096 if size_bytes >= 2**32 else 256
    layer_elements = size_bytes // n_layers // _F16_BYTES
    n_ff = max(256, (layer_elements - 4 * n_embd * n_embd) // (3 * n_embd) // 256 * 256)
    tensors = [
        _tensor("token_embd.weight", n_embd, _N_VOCAB),
        _norm("output_norm.weight", n_embd),
        _tensor("output.weight", n_embd, _N_VOCAB),
    ]
    for layer in range(n_layers):
        tensors += [
            _norm(f"blk.{layer}.attn_norm.weight", n_embd),
            *(
                _tensor(f"blk.{layer}.attn_{part}.weight", n_embd, n_embd)
                for part in ("q", "k", "v", "output")
            ),
            _norm(f"blk.{layer}.ffn_norm.weight", n_embd),
            _tensor(f"blk.{layer}.ffn_gate.weight", n_embd, n_ff),
            _tensor(f"blk.{layer}.ffn_up.weight", n_embd, n_ff),
            _tensor(f"blk.{layer}.ffn_down.weight", n_ff, n_embd),
        ]
    numbers = {
        "block_count": n_layers,
        "context_length": 4096,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": 32,
    }
    metadata = {
        "general.architecture": Value.of(ValueType.STRING, "llama"),
        "general.name": Value.of(ValueType.STRING, "sparse"),
        **{f"llama.{key}": Value.of(ValueType.UINT32, number) for key, number in numbers.items()},
    }
    return StageLayout(_ALIGNMENT, metadata, tuple(tensors))


def write_sparse(path: Path, layout: StageLayout, *, every_bytes: int, mark_bytes: int, seed: int) -> int:
    """Write it: random bytes at both ends of each tensor and in between, holes elsewhere.

    Args:
        path: The file.
        layout: Of the model.
        every_bytes: Between the beginnings of two marks in a tensor.
        mark_bytes: Of random bytes, each time; as many as `every_bytes` leave no hole.
        seed: Of the random bytes.

    Returns:
        How many random bytes there are.
    """
    random = Random(seed)
    written = 0
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.ftruncate(descriptor, stage_bytes(layout))
        header = encode_header(layout)
        write_all(descriptor, header, 0)
        at = len(header)
        for tensor in layout.tensors:
            last = max(0, tensor.n_bytes - mark_bytes)
            for start in sorted({*range(0, tensor.n_bytes, every_bytes), last}):
                data = random.randbytes(min(mark_bytes, tensor.n_bytes - start))
                write_all(descriptor, data, at + start)
                written += len(data)
            at += padded(tensor.n_bytes, layout.alignment)
    finally:
        os.close(descriptor)
    return written


def _tensor(name: str, width: int, rows: int) -> StageTensor:
    kind = GGMLQuantizationType.F16
    return StageTensor(name, (width, rows), kind, width * rows * _F16_BYTES, None)


def _norm(name: str, width: int) -> StageTensor:
    return StageTensor(name, (width,), GGMLQuantizationType.F32, width * 4, None)


def run_child(*arguments: str) -> ChildRun:
    """Run `tests.qualification.weights.child` to its end.

    Raises:
        MeshError: If it fails.
    """
    argv = program_command("tests.qualification.weights.child", *arguments)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeshError(f"{' '.join(argv[4:6])} failed: {done.stderr.strip()[-500:]}")
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
