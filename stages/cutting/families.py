"""What each family of models needs beyond the generic rules. The only place where an architecture has a name.

The generic rules (`stages.cutting.layout`) renumber layers and cut per-layer metadata. They are enough where
llama.cpp looks at a layer's own tensors and metadata only. A family that is not in this table is cut by them
after a self-check that compares the cut model with the whole one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stages.cutting.gguf_value import Value, ValueType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stages.cutting.gguf_header import GgufHeader
    from stages.layers import LayerRange


def _nothing_derived(_header: GgufHeader, _layers: LayerRange) -> Mapping[str, Value]:
    return {}


def _always_cuttable(_header: GgufHeader) -> str | None:
    return None


@dataclass(frozen=True)
class Family:
    """Rules of one architecture.

    Attributes:
        architecture: `general.architecture`.
        has_uniform_layers: Every layer has the same kinds of tensors, so one that lacks a kind is damaged.
        head_falls_back_to_embedding: llama.cpp takes `token_embd.weight` as the head if there is no
            `output.weight`. Then no stage needs a filler: one without a head leaves `output.weight` out, and
            the tail stores the head under the embedding's name.
        derived: Metadata that llama.cpp derives from a layer's number in the whole model, written out for
            the layers of a stage.
        refusal: Why this very model cannot be cut exactly anywhere, or None.
    """

    architecture: str
    has_uniform_layers: bool = False
    head_falls_back_to_embedding: bool = False
    derived: Callable[[GgufHeader, LayerRange], Mapping[str, Value]] = _nothing_derived
    refusal: Callable[[GgufHeader], str | None] = _always_cuttable


def _gemma3_windows(header: GgufHeader, layers: LayerRange) -> Mapping[str, Value]:
    """Every sixth layer attends to everything, the others to a sliding window, counted from layer 0.

    A stage that starts elsewhere would count from its own first layer, hence one bool a layer, true for a
    window. A file may give another period, or the pattern itself. In a stage whose layers all attend to
    everything the size of the window is 0: llama.cpp aborts on a model with a window and no layer for it.
    """
    size_key, pattern_key = "gemma3.attention.sliding_window", "gemma3.attention.sliding_window_pattern"
    if not header.integer(size_key, 0):
        return {}
    given = header.metadata.get(pattern_key)
    if given is not None and given.count is not None:
        n_layers = header.integer("gemma3.block_count")
        has_window = [bool(flag) for flag in header.per_layer(pattern_key, n_layers, 0)]
        pattern = tuple(has_window[layers.start : layers.stop])
    else:
        period = header.integer(pattern_key, 6)
        pattern = tuple(
            period == 0 or layer % period < period - 1 for layer in range(layers.start, layers.stop)
        )
    if not any(pattern):
        return {size_key: Value.of(ValueType.UINT32, 0), pattern_key: Value.array(ValueType.BOOL, pattern)}
    return {pattern_key: Value.array(ValueType.BOOL, pattern)}


def _gemma3_27b_attention_scale(header: GgufHeader) -> str | None:
    """llama.cpp knows Gemma 3 27B by its 62 layers and scales its attention by another width than the rest.

    No metadata key can say so to a stage, which has fewer.
    """
    n_layers = header.integer("gemma3.block_count")
    n_heads = max(header.per_layer("gemma3.attention.head_count", n_layers, 1))
    n_embd = header.integer("gemma3.embedding_length")
    key_length = header.integer("gemma3.attention.key_length", n_embd // n_heads)
    if n_layers != 62 or n_embd // n_heads == key_length:
        return None
    return (
        f"llama.cpp scales attention by 1/sqrt({n_embd // n_heads}) in a gemma3 of 62 layers and by "
        f"1/sqrt({key_length}) in any other, so a stage of it would compute something else"
    )


_TABLE: Final = (
    # Layers are all alike and look at nothing but themselves.
    Family("llama", has_uniform_layers=True, head_falls_back_to_embedding=True),
    Family("qwen2", has_uniform_layers=True, head_falls_back_to_embedding=True),
    Family("qwen3", has_uniform_layers=True, head_falls_back_to_embedding=True),
    # The scale of the embedding, sqrt(n_embd), is applied to token ids only: hidden states pass as they are.
    Family(
        "gemma3",
        has_uniform_layers=True,
        head_falls_back_to_embedding=True,
        derived=_gemma3_windows,
        refusal=_gemma3_27b_attention_scale,
    ),
)

FAMILIES: Final[Mapping[str, Family]] = {family.architecture: family for family in _TABLE}


def family_of(architecture: str) -> Family:
    """The family's rules, or the generic ones for an architecture that is not in the table."""
    return FAMILIES.get(architecture, Family(architecture))
