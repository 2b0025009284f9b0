"""Real models with a few of their layers: real weights and vocabularies at a fraction of the time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from stages.files import ModelFile, Region
from stages.gguf import Value, ValueType, read_header
from stages.slicing.layout import StageLayout, StageTensor
from stages.slicing.source_model import count_layers
from stages.slicing.stage_writer import StageWriter
from stages.slicing.tensor_names import EMBEDDING, is_per_layer, layer_of
from tests.support.gguf_source import GgufSource

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray


def write_short(source: Path, num_layers: int, output: Path, texts: Mapping[str, str] | None = None) -> Path:
    """A whole model of the first layers of another, everything else as it was; its texts make no sense.

    What each layer, or each way of computing, must do by itself shows in a few of them as in all.

    Args:
        source: The model, in one file.
        num_layers: How many to keep.
        output: The file to write.
        texts: Texts of the metadata that are different.

    Returns:
        The file.
    """
    header = read_header(source)
    metadata = {
        key: value.cut(0, num_layers)
        if is_per_layer(key, value, header.architecture, count_layers(header))
        else value
        for key, value in header.metadata.items()
    }
    metadata |= {key: Value.of(ValueType.STRING, text) for key, text in (texts or {}).items()}
    metadata[f"{header.architecture}.block_count"] = Value.of(ValueType.UINT32, num_layers)
    tensors = tuple(
        StageTensor(
            tensor.name,
            tensor.shape,
            tensor.type,
            tensor.n_bytes,
            Region(0, tensor.offset_bytes, tensor.n_bytes),
        )
        for tensor in header.tensors.values()
        if (layer_of(tensor.name) or 0) < num_layers
    )
    with ModelFile(source) as reader, output.open("wb") as file:
        StageWriter(reader, file, lambda _count: None).write(StageLayout(header.alignment, metadata, tensors))
    return output


@pytest.fixture(scope="session")
def short_smollm2_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers of SmolLM2; a test file that binds this name has it."""
    return write_short(smollm2_path, 6, tmp_path_factory.mktemp("short") / "short-smollm2.gguf")


@pytest.fixture(scope="session")
def short_gemma3_path(gemma3_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers of Gemma 3, the one without a sliding window among them; see `short_smollm2_path`."""
    return write_short(gemma3_path, 6, tmp_path_factory.mktemp("short") / "short-gemma3.gguf")


def embedding_of(model: Path) -> NDArray[np.float32]:
    """Rows of the tokens of a model, as llama.cpp looks them up."""
    found = GgufSource(model).tensors[EMBEDDING]
    rows: NDArray[np.float32] = gguf.quants.dequantize(found.data, found.tensor_type).astype(np.float32)
    return rows
