"""Names of tensors and metadata in a GGUF: which belong to a layer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from stages.gguf.header import ValueType

if TYPE_CHECKING:
    from stages.gguf.header import Value

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
)


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
