"""Drafters that are wrong in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

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
    reader = gguf.GGUFReader(source)
    own = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, values.get("architecture", own))
    for key, found in reader.fields.items():
        is_kept = key.startswith((f"{own}.", "tokenizer."))
        if is_kept and key not in values and key.removeprefix(f"{own}.") not in values:
            kind = found.types[0]
            inner = found.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, found.contents(), kind, inner)
    for name, value in values.items():
        key = name if name.startswith("tokenizer.") else f"{own}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, val=value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    for tensor in reader.tensors:
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
