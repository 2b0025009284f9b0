"""Rules for models that llama.cpp recognises by their number of layers, and for uncuttable ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from stages.gguf import Value, ValueType
from stages.slicing.architectures.rule_types import NO_BLANKS, Blanks, Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stages.gguf import GgufHeader
    from stages.layers import LayerRange

_LITE: Final = (26, 27)
_SMALL: Final = 48
_LITE_VOCAB: Final = 128_256
_GLM_VOCAB: Final = 154_880
_SOFTMAX, _SIGMOID = 1, 2
_SMALLTHINKER: Final = 4


def _n_layers(header: GgufHeader) -> int:
    return header.integer(f"{header.architecture}.block_count")


def every_cut(header: GgufHeader, reason: str) -> Mapping[int, str]:
    """Refusal of all cuts for one reason."""
    return dict.fromkeys(range(1, _n_layers(header)), reason)


def attention_scale(n_layers_of_27b: int) -> Rule:
    """The rule for Gemma's largest models, whose attention is scaled by another width than the others'."""

    def reason(header: GgufHeader) -> str | None:
        architecture = header.architecture
        n_heads = max(header.per_layer(f"{architecture}.attention.head_count", _n_layers(header), 1))
        by_width = header.integer(f"{architecture}.embedding_length") // max(1, n_heads)
        by_head = header.integer(f"{architecture}.attention.key_length", by_width)
        if by_width == by_head:
            return None
        return (
            f"llama.cpp scales attention by 1/sqrt({by_width}) in a {architecture} of {n_layers_of_27b} "
            f"layers and by 1/sqrt({by_head}) in any other, so a stage of it would compute something else"
        )

    def refused(header: GgufHeader) -> Mapping[int, str]:
        why = reason(header)
        return every_cut(header, why) if why and _n_layers(header) == n_layers_of_27b else {}

    def refused_lengths(header: GgufHeader) -> Mapping[int, str]:
        why = reason(header)
        return {n_layers_of_27b: why} if why and _n_layers(header) != n_layers_of_27b else {}

    return Rule(
        "scale by number of layers",
        f"a model of {n_layers_of_27b} layers has another scale of attention",
        refused=refused,
        refused_lengths=refused_lengths,
    )


def known_by_layers(numbers: tuple[int, ...], what: str) -> Rule:
    """The rule for models that llama.cpp treats differently for certain numbers of layers.

    Args:
        numbers: Numbers of layers.
        what: Effect of such a number.
    """

    def reason(number: int) -> str:
        return f"llama.cpp {what} in a model of {number} layers, regardless of its metadata"

    def refused(header: GgufHeader) -> Mapping[int, str]:
        return every_cut(header, reason(_n_layers(header))) if _n_layers(header) in numbers else {}

    def refused_lengths(header: GgufHeader) -> Mapping[int, str]:
        return {number: reason(number) for number in numbers if number != _n_layers(header)}

    shown = " or ".join(map(str, numbers))
    return Rule(
        "known by number of layers",
        f"llama.cpp {what} in a model of {shown} layers",
        refused=refused,
        refused_lengths=refused_lengths,
    )


def _n_vocab(header: GgufHeader) -> int:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    counted = 0 if tokens is None else tokens.count or 0
    return header.integer(f"{header.architecture}.vocab_size", counted)


def _is_lite(n_layers: int, n_vocab: int) -> bool:
    return n_layers in _LITE or (n_layers == _SMALL and n_vocab == _LITE_VOCAB)


def _deepseek2_derived(header: GgufHeader, layers: LayerRange) -> Mapping[str, Value | None]:
    prefix = f"{header.architecture}."
    values: dict[str, Value | None] = {}
    if len(layers) == _n_layers(header):
        return values
    if _is_lite(_n_layers(header), _n_vocab(header)):
        values[prefix + "attention.q_lora_rank"] = Value.of(ValueType.UINT32, 0)
    if not header.integer(prefix + "expert_gating_func", 0):
        is_glm = _n_layers(header) in (47, 48) and _n_vocab(header) == _GLM_VOCAB
        gating = _SIGMOID if is_glm else _SOFTMAX
        values[prefix + "expert_gating_func"] = Value.of(ValueType.UINT32, gating)
    return values


def _deepseek2_lengths(header: GgufHeader) -> Mapping[int, str]:
    if _is_lite(_n_layers(header), _n_vocab(header)):
        return {}
    return {
        number: f"llama.cpp takes a deepseek2 of {number} layers for a Lite, without compressed queries"
        for number in _LITE
        if number != _n_layers(header)
    }


DEEPSEEK2_LITE: Final = Rule(
    "Lite by number of layers",
    "llama.cpp recognises the Lite models, without compressed queries, by their 26 or 27 layers, and one "
    "gating function by 47 or 48; a stage's metadata name both",
    derived=_deepseek2_derived,
    refused_lengths=_deepseek2_lengths,
)


def _minicpm_scale(header: GgufHeader, layers: LayerRange) -> Mapping[str, Value | None]:
    key = f"{header.architecture}.residual_scale"
    if key in header.metadata or len(layers) == _n_layers(header):
        return {}
    # llama.cpp divides in single precision by the square root in single precision.
    root = Value.of(ValueType.FLOAT32, math.sqrt(_n_layers(header))).decode()
    scale = Value.of(ValueType.FLOAT32, _minicpm_quotient(float(root)))  # type: ignore[arg-type]
    return {key: scale}


def _minicpm_quotient(root: float) -> float:
    numerator = Value.of(ValueType.FLOAT32, 1.4).decode()
    return float(numerator) / root  # type: ignore[arg-type]


MINICPM_RESIDUAL: Final = Rule(
    "residual scale by number of layers",
    "without a residual scale in the file it is 1.4 over the root of the number of layers; a stage's "
    "metadata name it",
    derived=_minicpm_scale,
)


def _is_windowed(header: GgufHeader) -> bool:
    return header.integer(f"{header.architecture}.attention.sliding_window", 0) > 0


def _counts_to_four(header: GgufHeader) -> bool:
    """Whether a model has layers without positions, which it would not have with four layers."""
    return _is_windowed(header) and _n_layers(header) != _SMALLTHINKER


def _four_refused(header: GgufHeader) -> Mapping[int, str]:
    n_layers = _n_layers(header)
    if not _counts_to_four(header):
        return {}
    reasons = {
        n_layers
        - _SMALLTHINKER: f"llama.cpp gives positions to every layer of a file with just {_SMALLTHINKER} "
        "of them, as the tail would be",
        n_layers
        - 1: "the tail would be a single layer, with neither window nor positions: the blank that gives "
        "it a window makes it the second of its file, which has positions",
    }
    return {cut: why for cut, why in reasons.items() if cut > 0 and cut % _SMALLTHINKER == 0}


def _four_blanks(header: GgufHeader, layers: LayerRange) -> Blanks:
    if _counts_to_four(header):
        return Blanks(after=1) if len(layers) == _SMALLTHINKER else NO_BLANKS
    if _n_layers(header) != _SMALLTHINKER or not _is_windowed(header):
        return NO_BLANKS
    return Blanks(layers.start, _SMALLTHINKER - layers.stop)


FOUR_LAYERS: Final = Rule(
    "four layers",
    "llama.cpp leaves positions out of every fourth layer, but not in a model of four layers: a stage of "
    "four gets a fifth as a blank, which a tail cannot have",
    refused=_four_refused,
    blanks=_four_blanks,
)


def in_one_piece(reason: str, applies: Callable[[GgufHeader], bool] = lambda _header: True) -> Rule:
    """The rule of a family that cannot be cut.

    Args:
        reason: Reason.
        applies: Whether it applies to a model of the family.
    """

    def refused(header: GgufHeader) -> Mapping[int, str]:
        return every_cut(header, reason) if applies(header) else {}

    return Rule("in one piece", reason, refused=refused)
