"""Tiny random models of architectures that llama.cpp's own program leaves out.

`tests.qualification.tiny_models` writes them beside that program's. Matrices have 64 inputs at least: fast
kernels compute those of 32 inputs in Q8_0 wrongly, 32 rows and more at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tests.support.gemma4_shape import Gemma4Shape
from tests.support.tiny_families import (
    HEAD,
    HEADS,
    HEADS_KV,
    N_EMBD,
    N_EXPERT,
    Metadata,
    Noise,
    Tensors,
    TinyFamily,
    attention,
    dense,
    head_norms,
)
from tests.support.tiny_models import N_VOCAB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_N_FF: Final = 128
_N_FF_EXP: Final = 64
_WINDOW: Final = 16
_LORA: Final = 64
_ATTENTION: Final[Metadata] = {
    "feed_forward_length": _N_FF,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS_KV,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "rope.dimension_count": HEAD,
    "rope.freq_base": 10_000.0,
}
_EXPERTS: Final[Metadata] = {
    "expert_count": N_EXPERT,
    "expert_used_count": 2,
    "expert_feed_forward_length": _N_FF_EXP,
}
# Of Gemma 3n, hard-coded in llama.cpp.
_ALTUPS: Final = 4
_ALTUP_WIDTH: Final = 256
_GEMMA3N_LAYERS: Final = 22
# Tokens for pictures up to 8195 are hard-coded.
_CHAMELEON_VOCAB: Final = 8_256


def _norms(noise: Noise, *names: str, n_embd: int = N_EMBD) -> Tensors:
    return {f"{name}.weight": noise.vector(n_embd) for name in names}


def _experts(noise: Noise) -> Tensors:
    return {
        "ffn_gate_inp.weight": noise.matrix(N_EXPERT, N_EMBD),
        "ffn_gate_exps.weight": noise.matrix(N_EXPERT, _N_FF_EXP, N_EMBD),
        "ffn_up_exps.weight": noise.matrix(N_EXPERT, _N_FF_EXP, N_EMBD),
        "ffn_down_exps.weight": noise.matrix(N_EXPERT, N_EMBD, _N_FF_EXP),
    }


def _gemma4_attention(
    noise: Noise, shape: Gemma4Shape, number: int, *, has_own_kv: bool, has_values: bool
) -> Tensors:
    head, heads_kv, n_embd = shape.head(number), shape.heads_kv(number), shape.n_embd
    tensors = {
        "attn_q.weight": noise.matrix(shape.heads * head, n_embd),
        "attn_output.weight": noise.matrix(n_embd, shape.heads * head),
        "attn_q_norm.weight": noise.vector(head),
    }
    if has_own_kv:
        tensors["attn_k.weight"] = noise.matrix(heads_kv * head, n_embd)
        tensors["attn_k_norm.weight"] = noise.vector(head)
        if has_values:
            tensors["attn_v.weight"] = noise.matrix(heads_kv * head, n_embd)
    return tensors


def _gemma4(shape: Gemma4Shape, layer: Callable[[Noise, int], Tensors]) -> TinyFamily:
    """A Gemma 4, of which `layer` gives the tensors of a layer."""
    return TinyFamily(
        "gemma4",
        len(shape.windows),
        layer,
        shape.metadata() | {"attention.shared_kv_layers": 0, "final_logit_softcapping": 30.0},
        (),
        lambda noise: {"rope_freqs.weight": noise.vector(shape.broad // 2)},
        has_head=False,
        n_embd=shape.n_embd,
    )


def _gemma4_common(noise: Noise, shape: Gemma4Shape, n_ff: int | None = None) -> Tensors:
    names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    norms = _norms(noise, *names, n_embd=shape.n_embd)
    inner = dense(noise, n_ff=n_ff or shape.n_ff, n_embd=shape.n_embd)
    return norms | inner | {"layer_output_scale.weight": noise.vector(1)}


def gemma4_of(shape: Gemma4Shape) -> TinyFamily:
    """As 12B and 31B: values are the keys in layers without a window."""

    def layer(noise: Noise, number: int) -> Tensors:
        return _gemma4_common(noise, shape) | _gemma4_attention(
            noise, shape, number, has_own_kv=True, has_values=shape.windows[number]
        )

    return _gemma4(shape, layer)


def gemma4_dense(depth: int) -> TinyFamily:
    """As 12B and 31B, tiny."""
    return gemma4_of(Gemma4Shape((True, True, False) * depth))


def gemma4_moe(depth: int) -> TinyFamily:
    """As 26B-A4B: experts beside the dense part, with a router of its own scale."""
    dense_one = gemma4_dense(depth)

    def layer(noise: Noise, number: int) -> Tensors:
        return (
            dense_one.layer(noise, number)
            | _norms(noise, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
            | {
                "ffn_gate_inp.weight": noise.matrix(N_EXPERT, N_EMBD),
                "ffn_gate_inp.scale": noise.vector(N_EMBD),
                "ffn_down_exps.scale": noise.vector(N_EXPERT),
                "ffn_gate_up_exps.weight": noise.matrix(N_EXPERT, 2 * _N_FF_EXP, N_EMBD),
                "ffn_down_exps.weight": noise.matrix(N_EXPERT, N_EMBD, _N_FF_EXP),
            }
        )

    return _with(dense_one, layer=layer, metadata=_EXPERTS)


def gemma4_e(depth: int, n_embd: int = N_EMBD) -> TinyFamily:
    """As E2B and E4B: the last layers share the KV caches of the two before them and are wider inside, and
    each layer takes an embedding of its own."""
    own = (True, True, False) * depth + (True, False)
    shape = Gemma4Shape(own + (True, False) * depth, n_embd=n_embd)
    width, n_layers = _LORA, len(shape.windows)
    inner = [_N_FF if number < len(own) else 2 * _N_FF for number in range(n_layers)]

    def layer(noise: Noise, number: int) -> Tensors:
        is_own = number < len(own)
        return (
            _gemma4_common(noise, shape, inner[number])
            | _gemma4_attention(noise, shape, number, has_own_kv=is_own, has_values=is_own)
            | {
                "inp_gate.weight": noise.matrix(width, n_embd),
                "proj.weight": noise.matrix(n_embd, width),
                "post_norm.weight": noise.vector(n_embd),
            }
        )

    def outside(noise: Noise) -> Tensors:
        return {
            "rope_freqs.weight": noise.vector(shape.broad // 2),
            "per_layer_token_embd.weight": noise.matrix(N_VOCAB, width * n_layers),
            "per_layer_model_proj.weight": noise.matrix(width * n_layers, n_embd),
            "per_layer_proj_norm.weight": noise.vector(width),
        }

    shared: Metadata = {
        "attention.shared_kv_layers": n_layers - len(own),
        "feed_forward_length": inner,
        "embedding_length_per_layer_input": width,
    }
    return _with(_gemma4(shape, layer), metadata=shared, outside=outside)


def _with(
    family: TinyFamily,
    *,
    metadata: Metadata,
    layer: Callable[[Noise, int], Tensors] | None = None,
    outside: Callable[[Noise], Tensors] | None = None,
) -> TinyFamily:
    return replace(
        family,
        metadata=family.metadata | metadata,
        layer=layer or family.layer,
        outside=outside or family.outside,
    )


def gemma3n(depth: int) -> TinyFamily:
    """As E2B and E4B: several streams, and a low-rank path beside attention."""
    n_layers = _GEMMA3N_LAYERS * depth

    def layer(noise: Noise, _number: int) -> Tensors:
        return (
            attention(noise)
            | head_norms(noise)
            | dense(noise, n_ff=_N_FF)
            | _norms(noise, "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
            | _norms(noise, "altup_correct_scale", "altup_router_norm", "laurel_post_norm")
            | {
                "inp_gate.weight": noise.matrix(_ALTUP_WIDTH, N_EMBD),
                "proj.weight": noise.matrix(N_EMBD, _ALTUP_WIDTH),
                "altup_correct_coef.weight": noise.matrix(_ALTUPS, _ALTUPS),
                "altup_predict_coef.weight": noise.matrix(_ALTUPS * _ALTUPS, _ALTUPS),
                "altup_router.weight": noise.matrix(_ALTUPS, N_EMBD),
                "laurel_l.weight": noise.matrix(_LORA, N_EMBD),
                "laurel_r.weight": noise.matrix(N_EMBD, _LORA),
            }
        )

    def outside(noise: Noise) -> Tensors:
        return {
            "altup_proj.weight": noise.matrix(_ALTUPS - 1, N_EMBD, N_EMBD),
            "altup_unembd_proj.weight": noise.matrix(_ALTUPS - 1, N_EMBD, N_EMBD),
            "per_layer_token_embd.weight": noise.matrix(N_VOCAB, _ALTUP_WIDTH * n_layers),
            "per_layer_model_proj.weight": noise.matrix(_ALTUP_WIDTH * n_layers, N_EMBD),
            "per_layer_proj_norm.weight": noise.vector(_ALTUP_WIDTH),
        }

    window: Metadata = {"attention.sliding_window": _WINDOW}
    return TinyFamily("gemma3n", n_layers, layer, _ATTENTION | window, (), outside, has_head=False)


def step35(depth: int) -> TinyFamily:
    """As Step-3.5: windows with other numbers of heads, gates, a dense layer before those with experts."""
    windows = [number % 2 == 1 for number in range(2 * depth)]

    def layer(noise: Noise, number: int) -> Tensors:
        heads = 6 if windows[number] else HEADS
        tensors = attention(noise) | head_norms(noise) | _norms(noise, "ffn_norm")
        tensors |= {
            "attn_q.weight": noise.matrix(heads * HEAD, N_EMBD),
            "attn_output.weight": noise.matrix(N_EMBD, heads * HEAD),
            "attn_gate.weight": noise.matrix(heads, N_EMBD),
        }
        if number == 0:
            return tensors | dense(noise, n_ff=_N_FF)
        bias = {"exp_probs_b.bias": noise.vector(N_EXPERT, 0.0)}
        return tensors | _experts(noise) | dense(noise, "_shexp", _N_FF_EXP) | bias

    return TinyFamily(
        "step35",
        len(windows),
        layer,
        _ATTENTION
        | _EXPERTS
        | {
            "attention.head_count": [6 if is_windowed else HEADS for is_windowed in windows],
            "attention.head_count_kv": [HEADS_KV] * len(windows),
            "attention.sliding_window": _WINDOW,
            "attention.sliding_window_pattern": windows,
            "rope.freq_base_swa": 1_000.0,
            "leading_dense_block_count": 1,
            "expert_shared_feed_forward_length": _N_FF_EXP,
            "expert_weights_scale": 3.0,
            "expert_weights_norm": True,
            "swiglu_clamp_exp": [4.0 * is_windowed for is_windowed in windows],
            "swiglu_clamp_shexp": [5.0 * is_windowed for is_windowed in windows],
        },
        (),
        lambda noise: {"rope_freqs.weight": noise.vector(HEAD // 2)},
    )


def apertus(depth: int) -> TinyFamily:
    """As Apertus: an activation whose numbers differ from layer to layer."""
    n_layers = 2 * depth

    def layer(noise: Noise, _number: int) -> Tensors:
        tensors = attention(noise) | head_norms(noise) | _norms(noise, "ffn_norm") | dense(noise, n_ff=_N_FF)
        del tensors["ffn_gate.weight"]
        return tensors

    numbers = [1.0 + 0.25 * number for number in range(n_layers)]
    return TinyFamily(
        "apertus",
        n_layers,
        layer,
        _ATTENTION,
        (),
        general={
            "xielu.alpha_n": numbers,
            "xielu.alpha_p": [*reversed(numbers)],
            "xielu.beta": [0.5 * number for number in numbers],
            "xielu.eps": [-1e-6 * number for number in numbers],
        },
    )


def bitnet(depth: int) -> TinyFamily:
    """As BitNet: norms behind attention and inside the feed-forward part."""

    def layer(noise: Noise, _number: int) -> Tensors:
        norms = _norms(noise, "attn_sub_norm", "ffn_norm")
        inner = {"ffn_sub_norm.weight": noise.vector(_N_FF)}
        return attention(noise) | norms | inner | dense(noise, n_ff=_N_FF)

    return TinyFamily("bitnet", 2 * depth, layer, _ATTENTION, (), has_head=False)


def plm(depth: int) -> TinyFamily:
    """As PLM: compressed keys and values, decompressed in each layer."""

    def layer(noise: Noise, _number: int) -> Tensors:
        tensors = _norms(noise, "attn_norm", "ffn_norm") | dense(noise, n_ff=_N_FF)
        del tensors["ffn_gate.weight"]
        return tensors | {
            "attn_q.weight": noise.matrix(HEADS * 2 * HEAD, N_EMBD),
            "attn_kv_a_mqa.weight": noise.matrix(_LORA + HEAD, N_EMBD),
            "attn_kv_a_norm.weight": noise.vector(_LORA),
            "attn_kv_b.weight": noise.matrix(HEADS * 2 * HEAD, _LORA),
            "attn_output.weight": noise.matrix(N_EMBD, HEADS * HEAD),
        }

    heads: Metadata = {
        "attention.head_count_kv": HEADS,
        "attention.key_length": 2 * HEAD,
        "attention.kv_lora_rank": _LORA,
    }
    return TinyFamily("plm", 2 * depth, layer, _ATTENTION | heads, (), has_head=False)


def chameleon(depth: int) -> TinyFamily:
    """As Chameleon, of which llama.cpp writes text only."""

    def layer(noise: Noise, _number: int) -> Tensors:
        norms = {
            "attn_q_norm.weight": noise.matrix(HEADS, HEAD),
            "attn_k_norm.weight": noise.matrix(HEADS_KV, HEAD),
        }
        return attention(noise) | norms | _norms(noise, "ffn_norm") | dense(noise, n_ff=_N_FF)

    return TinyFamily("chameleon", 2 * depth, layer, _ATTENTION, (), n_vocab=_CHAMELEON_VOCAB)


def deepseek2_ocr(depth: int) -> TinyFamily:
    """As DeepSeek-OCR: experts behind a dense layer, and plain attention."""

    def layer(noise: Noise, number: int) -> Tensors:
        tensors = attention(noise) | _norms(noise, "ffn_norm")
        tensors |= {f"attn_{part}.weight": noise.matrix(N_EMBD, N_EMBD) for part in "kv"}
        if number == 0:
            return tensors | dense(noise, n_ff=_N_FF)
        return tensors | _experts(noise) | dense(noise, "_shexp", _N_FF_EXP)

    more: Metadata = {
        "attention.head_count_kv": HEADS,
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
    }
    return TinyFamily("deepseek2-ocr", 2 * depth, layer, _ATTENTION | _EXPERTS | more, ())


def graniteswitch(depth: int) -> TinyFamily:
    """As Granite with adapters in the file, which tokens switch on."""
    slots, width_kv = 32, HEADS_KV * HEAD

    def adapter(noise: Noise, name: str, rows: int, columns: int) -> Tensors:
        return {
            f"{name}.lora_a": noise.matrix(slots, _LORA, columns),
            f"{name}.lora_b": noise.matrix(slots, rows, _LORA),
        }

    def layer(noise: Noise, _number: int) -> Tensors:
        tensors = _norms(noise, "attn_norm", "ffn_norm") | dense(noise, n_ff=_N_FF)
        tensors |= {
            "attn_qkv.weight": noise.matrix(N_EMBD + 2 * width_kv, N_EMBD),
            "attn_output.weight": noise.matrix(N_EMBD, N_EMBD),
        }
        shapes = {
            "attn_q": (N_EMBD, N_EMBD),
            "attn_k": (width_kv, N_EMBD),
            "attn_v": (width_kv, N_EMBD),
            "attn_output": (N_EMBD, N_EMBD),
            "ffn_gate": (_N_FF, N_EMBD),
            "ffn_up": (_N_FF, N_EMBD),
            "ffn_down": (N_EMBD, _N_FF),
        }
        for name, shape in shapes.items():
            tensors |= adapter(noise, name, *shape)
        return tensors

    more: Metadata = {
        "logit_scale": 2.0,
        "embedding_scale": 12.0,
        "residual_scale": 0.5,
        "adapters.count": slots - 1,
        "adapters.lora_rank": _LORA,
        "adapters.token_ids_activate": [*range(100, 99 + slots)],
        "adapters.token_ids_substitute": [*range(4, 3 + slots)],
    }
    return TinyFamily("graniteswitch", 2 * depth, layer, _ATTENTION | more, ())


def _rwkv(architecture: str, depth: int, layer: Callable[[Noise, int], Tensors], **more: int) -> TinyFamily:
    def outside(noise: Noise) -> Tensors:
        return {
            "token_embd_norm.weight": noise.vector(N_EMBD),
            "token_embd_norm.bias": noise.vector(N_EMBD, 0.0),
            "output_norm.bias": noise.vector(N_EMBD, 0.0),
        }

    metadata: Metadata = {
        "feed_forward_length": _N_FF,
        "attention.head_count": 0,
        "attention.layer_norm_epsilon": 1e-5,
        "wkv.head_size": N_EMBD,
        "token_shift_count": 2,
        **more,
    }
    return TinyFamily(architecture, 4 * depth, layer, metadata, (), outside)


def _rwkv_norms(noise: Noise) -> Tensors:
    return {
        f"{name}.{part}": noise.vector(N_EMBD, mean)
        for name in ("attn_norm", "attn_norm_2", "time_mix_ln")
        for part, mean in (("weight", 1.0), ("bias", 0.0))
    }


def _squares(noise: Noise, *names: str) -> Tensors:
    return {f"{name}.weight": noise.matrix(N_EMBD, N_EMBD) for name in names}


def _time_mix(noise: Noise) -> Tensors:
    return _squares(noise, "time_mix_key", "time_mix_value", "time_mix_receptance", "time_mix_output")


def _rwkv6_time_mix(noise: Noise) -> Tensors:
    return _time_mix(noise) | {
        "time_mix_gate.weight": noise.matrix(N_EMBD, N_EMBD),
        "time_mix_w1.weight": noise.matrix(5 * _LORA, N_EMBD),
        "time_mix_w2.weight": noise.matrix(5, N_EMBD, _LORA),
        "time_mix_lerp_x.weight": noise.matrix(1, 1, N_EMBD),
        "time_mix_lerp_fused.weight": noise.matrix(5, 1, 1, N_EMBD),
        "time_mix_decay.weight": noise.vector(N_EMBD, -1.0),
        "time_mix_decay_w1.weight": noise.matrix(_LORA, N_EMBD),
        "time_mix_decay_w2.weight": noise.matrix(N_EMBD, _LORA),
    }


def rwkv6(depth: int) -> TinyFamily:
    """As RWKV 6."""

    def layer(noise: Noise, _number: int) -> Tensors:
        return (
            _rwkv_norms(noise)
            | _rwkv6_time_mix(noise)
            | {
                "time_mix_first.weight": noise.matrix(1, N_EMBD),
                "channel_mix_lerp_k.weight": noise.matrix(1, 1, N_EMBD),
                "channel_mix_lerp_r.weight": noise.matrix(1, 1, N_EMBD),
                "channel_mix_key.weight": noise.matrix(_N_FF, N_EMBD),
                "channel_mix_value.weight": noise.matrix(N_EMBD, _N_FF),
                "channel_mix_receptance.weight": noise.matrix(N_EMBD, N_EMBD),
            }
        )

    more = {"time_mix_extra_dim": _LORA, "time_decay_extra_dim": _LORA, "rescale_every_n_layers": 2}
    return _rwkv("rwkv6", depth, layer, **more)


def rwkv6qwen2(depth: int) -> TinyFamily:
    """As QRWKV 6, a Qwen 2 whose attention was replaced."""

    def layer(noise: Noise, _number: int) -> Tensors:
        norms = _norms(noise, "attn_norm", "ffn_norm")
        return norms | _rwkv6_time_mix(noise) | dense(noise, n_ff=_N_FF)

    more = {"time_mix_extra_dim": _LORA, "time_decay_extra_dim": _LORA, "token_shift_count": 1}
    return replace(_rwkv("rwkv6qwen2", depth, layer, **more), outside=_nothing)


def _nothing(_noise: Noise) -> Tensors:
    return {}


def _rwkv7_time_mix(noise: Noise) -> Tensors:
    tensors = _time_mix(noise)
    for part in "wav":
        tensors |= {
            f"time_mix_{part}0.weight": noise.vector(N_EMBD, 0.0),
            f"time_mix_{part}1.weight": noise.matrix(_LORA, N_EMBD),
            f"time_mix_{part}2.weight": noise.matrix(N_EMBD, _LORA),
        }
    return tensors | {
        "time_mix_g1.weight": noise.matrix(_LORA, N_EMBD),
        "time_mix_g2.weight": noise.matrix(N_EMBD, _LORA),
        "time_mix_lerp_fused.weight": noise.matrix(6, 1, 1, N_EMBD),
        "time_mix_k_k.weight": noise.vector(N_EMBD),
        "time_mix_k_a.weight": noise.vector(N_EMBD),
        "time_mix_r_k.weight": noise.vector(N_EMBD, 0.0),
    }


_RWKV7_LORAS: Final = {
    f"attention.{name}_lora_rank": _LORA for name in ("decay", "iclr", "value_residual_mix", "gate")
}


def rwkv7(depth: int) -> TinyFamily:
    """As RWKV 7."""

    def layer(noise: Noise, _number: int) -> Tensors:
        return (
            _rwkv_norms(noise)
            | _rwkv7_time_mix(noise)
            | {
                "channel_mix_lerp_k.weight": noise.matrix(1, 1, N_EMBD),
                "channel_mix_key.weight": noise.matrix(_N_FF, N_EMBD),
                "channel_mix_value.weight": noise.matrix(N_EMBD, _N_FF),
            }
        )

    return _rwkv("rwkv7", depth, layer, **_RWKV7_LORAS)


def arwkv7(depth: int) -> TinyFamily:
    """As ARWKV 7, a Qwen 2.5 whose attention was replaced."""

    def layer(noise: Noise, _number: int) -> Tensors:
        norms = _norms(noise, "attn_norm", "ffn_norm")
        return norms | _rwkv7_time_mix(noise) | dense(noise, n_ff=_N_FF)

    more = {**_RWKV7_LORAS, "token_shift_count": 1}
    return replace(_rwkv("arwkv7", depth, layer, **more), outside=_nothing)


OWN_MODELS: Final[Mapping[str, Callable[[int], TinyFamily]]] = {
    "apertus-dense": apertus,
    "arwkv7-dense": arwkv7,
    "bitnet-dense": bitnet,
    "chameleon-dense": chameleon,
    "deepseek2-ocr-moe": deepseek2_ocr,
    "gemma3n-dense": gemma3n,
    "gemma4-dense": gemma4_dense,
    "gemma4-e": gemma4_e,
    "gemma4-moe": gemma4_moe,
    "graniteswitch-dense": graniteswitch,
    "plm-dense": plm,
    "rwkv6-dense": rwkv6,
    "rwkv6qwen2-dense": rwkv6qwen2,
    "rwkv7-dense": rwkv7,
    "step35-moe": step35,
}
"""By name of the file, given a depth: what the usual number of layers is multiplied by."""


WITH_PREDICTION_LAYER: Final = ("step35-moe",)
"""Those of them whose layers for multi-token prediction llama.cpp computes."""


def write_own_models(folder: Path, depth: int = 1, n_prediction_layers: int = 0) -> None:
    """Write them.

    Args:
        folder: An existing folder.
        depth: What the usual number of layers is multiplied by.
        n_prediction_layers: Layers for multi-token prediction behind these, 0 or 1. With 1 those of
            `WITH_PREDICTION_LAYER` only.
    """
    for name in WITH_PREDICTION_LAYER if n_prediction_layers else OWN_MODELS:
        family = OWN_MODELS[name](depth)
        if n_prediction_layers:
            family = family.with_prediction_layer()
        family.write(folder / f"{name}.gguf")
