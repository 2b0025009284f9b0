"""Which metadata have one entry for each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stages.gguf.header import ValueType

if TYPE_CHECKING:
    from stages.gguf.header import Value

# Arrays below the architecture's name that have a fixed length, which may happen to be the number of layers.
_NOT_PER_LAYER: Final = (
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
