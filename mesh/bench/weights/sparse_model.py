"""A model file of any size that takes hardly any disk: real header, real tensors, holes for most weights."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING, Final

from gguf.constants import GGMLQuantizationType

from stages.gguf.file_io import write_all
from stages.gguf.header import Value, ValueType
from stages.slicing.layout import StageLayout, StageTensor
from stages.slicing.stage_writer import encode_header, padded, stage_bytes

if TYPE_CHECKING:
    from pathlib import Path

_ALIGNMENT: Final = 32
_N_VOCAB: Final = 1024
_F16_BYTES: Final = 2
_MOST_LAYER_BYTES: Final = 2 * 2**30


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
    random = Random(seed)  # noqa: S311 - nothing secret
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
