"""Files of drafters that lie beside models: only what their headers tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

from tests.support.tiny_models import add_vocabulary

if TYPE_CHECKING:
    from pathlib import Path


def write_header(path: Path, architecture: str, *, n_prediction_layers: int = 0) -> Path:
    """A file of an architecture with one layer and an embedding of 64 values.

    Args:
        path: Where to.
        architecture: `general.architecture`.
        n_prediction_layers: As Gemma 4's assistants count theirs.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    if n_prediction_layers:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", n_prediction_layers)
    add_vocabulary(writer)
    for name in ("token_embd.weight", "blk.0.attn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones((320, 64) if name.startswith("token") else 64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
