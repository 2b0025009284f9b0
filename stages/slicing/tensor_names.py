"""Names of tensors and metadata in a GGUF: which belong to a layer, and which to the trunk.

The trunk is what is before layers for multi-token prediction. A file counts these among its layers
(`block_count`) and says how many they are (`nextn_predict_layers`). They predict tokens further ahead from
the trunk's output, and the trunk does not use them. Stages therefore hold layers of the trunk only, and are
files without prediction layers to llama.cpp.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import InvalidModel, UncuttableModel
from stages.gguf import Value, ValueType

if TYPE_CHECKING:
    from stages.gguf import GgufHeader

EMBEDDING: Final = "token_embd.weight"
OUTPUT_NORM: Final = "output_norm.weight"
OUTPUT: Final = "output.weight"
OUTPUT_BIAS: Final = "output.bias"
_BLOCK: Final = re.compile(r"blk\.([0-9]{1,9})\.(.+)")
# Arrays below the architecture's name of a fixed length, which may happen to equal the number of layers.
_NOT_PER_LAYER: Final = (
    "rope.dimension_sections",
    "classifier.output_labels",
    "ple.layers",
    "ple.layer_multipliers",
    "ple.head_offsets",
    "ple.head_vocab_sizes",
    "adapters.token_ids_activate",
    "adapters.token_ids_substitute",
)
_COUNT: Final = "nextn_predict_layers"


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to: `blk.7.attn_q.weight` gives 7, `rope_freqs.weight` None."""
    match = _BLOCK.fullmatch(name)
    return int(match[1]) if match else None


def renumbered(name: str, shift: int) -> str:
    """The tensor's name when its layer moves down by `shift`."""
    match = _BLOCK.fullmatch(name)
    return f"blk.{int(match[1]) - shift}.{match[2]}" if match else name


def is_per_layer(key: str, value: Value, architecture: str, n_layers: int) -> bool:
    """Whether a metadata value has one entry for each layer."""
    return (
        key.startswith(f"{architecture}.")
        and value.count == n_layers
        and not key.endswith(_NOT_PER_LAYER)
        and value.type is not ValueType.STRING
    )


def count_prediction_layers(header: GgufHeader) -> int:
    """Number of prediction layers at the end of a model, from the metadata.

    Raises:
        InvalidModel: If the number is not one of layers of the model with one left for the trunk.
    """
    architecture = header.architecture
    count = header.integer(f"{architecture}.{_COUNT}", 0)
    n_layers = header.integer(f"{architecture}.block_count")
    if not 0 <= count < max(n_layers, 1):
        raise InvalidModel(f"{header.path}: {architecture}.{_COUNT} is {count} of {n_layers} layers")
    return count


def trunk_of(header: GgufHeader) -> GgufHeader:
    """The header without prediction layers: their tensors, their entries of lists, and their number.

    Lists may have an entry for each layer of the trunk, or of the file.

    Raises:
        InvalidModel: If the number of prediction layers is impossible.
        UncuttableModel: If the file has prediction layers only.
    """
    architecture = header.architecture
    count = count_prediction_layers(header)
    if not count:
        return header
    n_layers = header.integer(f"{architecture}.block_count")
    n_trunk = n_layers - count
    of_trunk = {
        name: tensor
        for name, tensor in header.tensors.items()
        if (layer := layer_of(name)) is None or not n_trunk <= layer < n_layers
    }
    if not any(layer_of(name) is not None for name in of_trunk):
        raise UncuttableModel(
            f"{header.path.name} has layers for multi-token prediction only: name the whole model"
        )
    metadata = {
        key: value.cut(0, n_trunk) if is_per_layer(key, value, architecture, n_layers) else value
        for key, value in header.metadata.items()
        if key != f"{architecture}.{_COUNT}"
    }
    metadata[f"{architecture}.block_count"] = Value.of(ValueType.UINT32, n_trunk)
    return replace(header, metadata=metadata, tensors=of_trunk)
