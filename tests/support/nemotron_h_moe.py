"""A small random model of architecture nemotron_h_moe with a layer for multi-token prediction.

Each layer of the trunk is Mamba, attention or experts. The prediction layer has attention and experts, and no
recurrent state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.support.tiny_families import (
    HEADS_KV,
    N_EMBD,
    N_EXPERT,
    N_FF_EXP,
    TINY_FAMILIES,
    TinyFamily,
    attention,
    dense,
    experts,
    prediction,
    state_space,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.tiny_families import Noise, Tensors

# Mamba, experts, attention; the last one predicts.
_LAYERS: Final = "MEM*EMM*E"
_PREDICTION: Final = "P"


def write_nemotron_h_moe(path: Path) -> Path:
    """Write the model: a trunk of 9 layers, whose state is recurrent in 4, and the prediction layer."""
    kinds = _LAYERS + _PREDICTION
    return TinyFamily(
        "nemotron_h_moe",
        len(kinds),
        _layer,
        TINY_FAMILIES["nemotron_h"].metadata
        | {
            "attention.head_count_kv": [HEADS_KV * (kind in "*P") for kind in kinds],
            "feed_forward_length": [N_FF_EXP * (kind in "EP") for kind in kinds],
            "nextn_predict_layers": 1,
            "expert_count": N_EXPERT,
            "expert_used_count": 2,
            "expert_feed_forward_length": N_FF_EXP,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": N_FF_EXP,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.0,
        },
        (3, 6),
    ).write(path)


def _layer(noise: Noise, layer: int) -> Tensors:
    kind = (_LAYERS + _PREDICTION)[layer]
    norm = {"attn_norm.weight": noise.vector(N_EMBD)}
    if kind == "M":
        return norm | state_space(noise)
    if kind == "*":
        return attention(noise)
    if kind == "E":
        return norm | _experts(noise)
    own = prediction(noise) | {"post_attention_norm.weight": noise.vector(N_EMBD)}
    return attention(noise) | _experts(noise) | own


def _experts(noise: Noise) -> Tensors:
    tensors = experts(noise) | dense(noise, "_shexp", N_FF_EXP)
    tensors["exp_probs_b.bias"] = noise.vector(N_EXPERT, 0.0)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("ffn_gate_")} | {
        "ffn_gate_inp.weight": tensors["ffn_gate_inp.weight"]
    }
