"""A small whole model out of a large one: its first layers and tokens, with all that a real file has."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING

from stages.gguf.file_io import ModelFile, atomic_write
from stages.gguf.header import Value, ValueType
from stages.gguf.reader import read_header
from stages.layers import LayerRange
from stages.slicing.layout import lay_out
from stages.slicing.source_model import EMBEDDING, OUTPUT, OUTPUT_BIAS, read_source
from stages.slicing.stage_writer import StageWriter

if TYPE_CHECKING:
    from pathlib import Path

    from stages.slicing.layout import StageLayout, StageTensor


def small_layout(source: Path, *, num_layers: int, num_tokens: int) -> StageLayout:
    """A model that has only the first layers and tokens of another. What it says is nonsense.

    Args:
        source: A GGUF file, whole.
        num_layers: How many layers to keep.
        num_tokens: How many tokens and merges of the vocabulary to keep.

    Raises:
        ModelError: If the source is no such file.
    """
    model = read_source(source)
    layers = LayerRange(0, min(num_layers, model.n_layers))
    layout = lay_out(model, layers)
    metadata = {key: value for key, value in layout.metadata.items() if not key.startswith("spanmesh.")}
    for key, value in model.header.metadata.items():
        if key.startswith("tokenizer."):
            metadata[key] = _first(value, num_tokens)
    metadata[f"{model.header.architecture}.vocab_size"] = Value.of(ValueType.UINT32, num_tokens)
    tensors = tuple(_with_rows(tensor, num_tokens) for tensor in layout.tensors)
    return replace(layout, metadata=metadata, tensors=tensors)


def write_layout(source: Path, layout: StageLayout, output: Path) -> None:
    """Write such a model.

    Raises:
        ModelError: If that cannot be done.
    """
    with ModelFile(*read_header(source).paths) as reader, atomic_write(output) as file:
        StageWriter(reader, file, lambda _count: None).write(layout)


def _first(value: Value, count: int) -> Value:
    """The first entries of an array; a scalar, or a short array, as it is."""
    if value.count is None or value.count <= count:
        return value
    if value.type is not ValueType.STRING:
        return value.cut(0, count)
    end = 0
    for _ in range(count):
        end += 8 + struct.unpack_from("<Q", value.payload, end)[0]
    return Value(value.type, count, value.payload[:end])


def _with_rows(tensor: StageTensor, num_rows: int) -> StageTensor:
    """A tensor that has one row for each token, with fewer of them."""
    if tensor.name not in (EMBEDDING, OUTPUT, OUTPUT_BIAS):
        return tensor
    num_bytes = tensor.n_bytes // tensor.shape[-1] * num_rows
    return replace(tensor, shape=(*tensor.shape[:-1], num_rows), n_bytes=num_bytes)
