"""Drafters that are wrong in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from tests.support.gguf_source import GgufSource

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_changed(source: Path, path: Path, values: Mapping[str, Any]) -> Path:
    """Write a drafter again with other values.

    Args:
        source: The drafter.
        path: The new file.
        values: By key without the architecture's prefix, by key of the tokenizer, or by tensor: an integer, a
            list, a bool or an array; None leaves it out. `architecture` is the architecture.

    Returns:
        The new file.
    """
    read = GgufSource(source)
    own = read.header.architecture
    writer = gguf.GGUFWriter(path, values.get("architecture", own))

    def is_kept(key: str) -> bool:
        is_known = key.startswith((f"{own}.", "tokenizer."))
        return is_known and key not in values and key.removeprefix(f"{own}.") not in values

    read.copy_metadata(writer, is_kept)
    for name, value in values.items():
        key = name if name.startswith("tokenizer.") else f"{own}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, val=value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    for tensor in read.tensors.values():
        if tensor.name not in values:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
