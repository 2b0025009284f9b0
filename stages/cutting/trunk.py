"""A model without the layers behind its head that only predict further tokens.

Files of some families end in such layers (`nextn_predict_layers`), and count them. llama.cpp does not
compute them unless it is asked to draft with them, so no stage gets them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stages.cutting.gguf_value import Value, ValueType
from stages.cutting.tensors import layer_of

if TYPE_CHECKING:
    from stages.cutting.gguf_header import GgufHeader


def trunk_of(header: GgufHeader, n_layers: int) -> GgufHeader:
    """The header as if the file had the first layers only.

    Args:
        header: Of the file.
        n_layers: How many.
    """
    architecture = header.architecture
    counted = header.integer(f"{architecture}.block_count")
    if n_layers == counted:
        return header
    metadata = {
        key: value.cut(0, n_layers) if is_per_layer(key, value, architecture, counted) else value
        for key, value in header.metadata.items()
        if key != f"{architecture}.nextn_predict_layers"
    }
    metadata[f"{architecture}.block_count"] = Value.of(ValueType.UINT32, n_layers)
    tensors = {
        name: tensor
        for name, tensor in header.tensors.items()
        if (layer := layer_of(name)) is None or not n_layers <= layer < counted
    }
    return replace(header, metadata=metadata, tensors=tensors)


# Arrays below the architecture's name that have a fixed length, which may happen to be the number of layers.
_NOT_PER_LAYER = (
    "rope.dimension_sections",
    "classifier.output_labels",
    "ple.layers",
    "ple.layer_multipliers",
    "ple.head_offsets",
    "ple.head_vocab_sizes",
)


def is_per_layer(key: str, value: Value, architecture: str, n_layers: int) -> bool:
    """Whether a metadata value has one entry for each layer."""
    return (
        key.startswith(f"{architecture}.")
        and value.count == n_layers
        and not key.endswith(_NOT_PER_LAYER)
        and value.type is not ValueType.STRING
    )
