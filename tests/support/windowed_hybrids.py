"""Tiny random models whose states hold rows in sliding windows beside what is recurrent."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.tiny_families import (
    HEAD,
    HEADS,
    HEADS_KV,
    N_EMBD,
    N_EXPERT,
    N_FF_EXP,
    WINDOW,
    Noise,
    Tensors,
    TinyFamily,
    attention,
    dense,
    experts,
    head_norms,
)

# DeepSeek V4: rows in a window, and compressed ones, of 4 and of 128 positions each.
_RATIOS = [0, 4, 128]
# llama.cpp turns the indexer's keys in blocks of 64.
_WIDE = 64
_LORA, _GROUPS, _STREAMS = 32, 2, 4
_MIXES = (2 + _STREAMS) * _STREAMS


def _streams(noise: Noise, part: str) -> Tensors:
    return {
        f"hc_{part}_fn.weight": noise.matrix(_MIXES, _STREAMS * N_EMBD),
        f"hc_{part}_base.weight": noise.vector(_MIXES, 0.0),
        f"hc_{part}_scale.weight": noise.vector(3),
    }


def _compressor(noise: Noise, prefix: str, ratio: int, width: int) -> Tensors:
    rows = (2 if ratio == _RATIOS[1] else 1) * width
    return {
        f"{prefix}_kv.weight": noise.matrix(rows, N_EMBD),
        f"{prefix}_gate.weight": noise.matrix(rows, N_EMBD),
        f"{prefix}_ape.weight": noise.matrix(ratio, rows),
        f"{prefix}_norm.weight": noise.vector(width),
    }


def _deepseek4(noise: Noise, layer: int) -> Tensors:
    ratio = _RATIOS[layer]
    tensors = {
        "attn_norm.weight": noise.vector(N_EMBD),
        "attn_sinks.weight": noise.vector(HEADS, 0.0),
        "attn_q_a.weight": noise.matrix(_LORA, N_EMBD),
        "attn_q_a_norm.weight": noise.vector(_LORA),
        "attn_q_b.weight": noise.matrix(HEADS * _WIDE, _LORA),
        "attn_kv.weight": noise.matrix(_WIDE, N_EMBD),
        "attn_kv_a_norm.weight": noise.vector(_WIDE),
        "attn_output_a.weight": noise.matrix(_GROUPS * _LORA, HEADS * _WIDE // _GROUPS),
        "attn_output_b.weight": noise.matrix(N_EMBD, _GROUPS * _LORA),
        "exp_probs_b.bias": noise.vector(N_EXPERT, 0.0),
        "ffn_norm.weight": noise.vector(N_EMBD),
    }
    tensors |= _streams(noise, "attn") | _streams(noise, "ffn")
    tensors |= experts(noise) | dense(noise, "_shexp", N_FF_EXP)
    if ratio:
        tensors |= _compressor(noise, "attn_compressor", ratio, _WIDE)
    if ratio == _RATIOS[1]:
        tensors |= _compressor(noise, "indexer_compressor", ratio, _WIDE)
        tensors["indexer.proj.weight"] = noise.matrix(HEADS, N_EMBD)
        tensors["indexer.attn_q_b.weight"] = noise.matrix(HEADS * _WIDE, _LORA)
    return tensors


def _deepseek4_outside(noise: Noise) -> Tensors:
    return {
        "output_hc_fn.weight": noise.matrix(_STREAMS, _STREAMS * N_EMBD),
        "output_hc_base.weight": noise.vector(_STREAMS, 0.0),
        "output_hc_scale.weight": noise.vector(1),
    }


DEEPSEEK4 = TinyFamily(
    "deepseek4",
    len(_RATIOS),
    _deepseek4,
    {
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": _WIDE,
        "attention.value_length": _WIDE,
        "attention.q_lora_rank": _LORA,
        "attention.sliding_window": WINDOW,
        "attention.indexer.head_count": HEADS,
        "attention.indexer.key_length": _WIDE,
        "attention.indexer.top_k": WINDOW,
        "attention.output_group_count": _GROUPS,
        "attention.output_lora_rank": _LORA,
        "attention.compress_ratios": _RATIOS,
        "attention.compress_rope_freq_base": 160_000.0,
        "hyper_connection.count": _STREAMS,
        "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": 0,
        "rope.dimension_count": _WIDE // 2,
        "rope.freq_base": 10_000.0,
        "expert_count": N_EXPERT,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": N_FF_EXP,
        "expert_gating_func": 4,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "swiglu_clamp_exp": 10.0,
    },
    (),
    _deepseek4_outside,
)

# LFM2: convolutions, and attention with a window in every second layer.
_CONVOLVED = 3
_LFM2_HEADS = [0, HEADS_KV, 0, HEADS_KV]


def _lfm2(noise: Noise, layer: int) -> Tensors:
    tensors = dense(noise) | {"ffn_norm.weight": noise.vector(N_EMBD)}
    if _LFM2_HEADS[layer]:
        return tensors | attention(noise) | head_norms(noise)
    return tensors | {
        "attn_norm.weight": noise.vector(N_EMBD),
        "shortconv.conv.weight": noise.matrix(N_EMBD, _CONVOLVED),
        "shortconv.in_proj.weight": noise.matrix(3 * N_EMBD, N_EMBD),
        "shortconv.out_proj.weight": noise.matrix(N_EMBD, N_EMBD),
    }


@dataclass(frozen=True)
class _Lfm2(TinyFamily):
    """As `TinyFamily`, with the name that llama.cpp gives the last norm of this family."""

    def _weights(self) -> Tensors:
        weights = super()._weights()
        weights["token_embd_norm.weight"] = weights.pop("output_norm.weight")
        return weights


LFM2 = _Lfm2(
    "lfm2",
    len(_LFM2_HEADS),
    _lfm2,
    {
        "attention.head_count": HEADS,
        "attention.head_count_kv": _LFM2_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.sliding_window": WINDOW,
        "rope.freq_base": 10_000.0,
        "shortconv.l_cache": _CONVOLVED,
    },
    (),
    has_head=False,
)
