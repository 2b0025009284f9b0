"""Tiny random models of families whose layers are unlike llama's, made by gguf-py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.support.tiny_models import N_VOCAB, add_vocabulary, copy_vocabulary, write_weights

Tensors = dict[str, NDArray[np.float32]]
Metadata = dict[str, int | float | bool | list[int] | list[float] | list[bool]]

N_EMBD, N_FF, N_FF_EXP, HEADS, HEADS_KV, HEAD = 64, 96, 32, 4, 2, 16
N_EXPERT, N_STATE, N_INNER, WINDOW = 4, 16, 128, 16
# What llama.cpp computes with as it is, or looks into, whatever its shape.
_UNQUANTISED = (
    *("conv1d", "ssm_a", "ssm_d", "ssm_norm", "gate_inp", "k_b", "bias", "sinks"),
    *("lerp", "time_mix_first", "q_norm", "k_norm"),
)


class Noise:
    """Seeded weights of a sensible size."""

    def __init__(self, seed: int) -> None:
        self._noise = np.random.default_rng(seed)

    def matrix(self, *shape: int) -> NDArray[np.float32]:
        return self._noise.normal(0.0, 1.5 / np.sqrt(shape[-1]), shape).astype(np.float32)

    def vector(self, size: int, mean: float = 1.0) -> NDArray[np.float32]:
        return self._noise.normal(mean, 0.1, size).astype(np.float32)


def attention(noise: Noise, head: int = HEAD) -> Tensors:
    return {
        "attn_norm.weight": noise.vector(N_EMBD),
        "attn_q.weight": noise.matrix(HEADS * head, N_EMBD),
        "attn_k.weight": noise.matrix(HEADS_KV * head, N_EMBD),
        "attn_v.weight": noise.matrix(HEADS_KV * head, N_EMBD),
        "attn_output.weight": noise.matrix(N_EMBD, HEADS * head),
    }


def head_norms(noise: Noise, head: int = HEAD) -> Tensors:
    return {f"attn_{part}_norm.weight": noise.vector(head) for part in "qk"}


def dense(noise: Noise, suffix: str = "", n_ff: int = N_FF, n_embd: int = N_EMBD) -> Tensors:
    return {
        f"ffn_gate{suffix}.weight": noise.matrix(n_ff, n_embd),
        f"ffn_up{suffix}.weight": noise.matrix(n_ff, n_embd),
        f"ffn_down{suffix}.weight": noise.matrix(n_embd, n_ff),
    }


def prediction(noise: Noise) -> Tensors:
    """Tensors of a layer for multi-token prediction, beyond those of any other layer."""
    return {
        "nextn.eh_proj.weight": noise.matrix(N_EMBD, 2 * N_EMBD),
        "nextn.enorm.weight": noise.vector(N_EMBD),
        "nextn.hnorm.weight": noise.vector(N_EMBD),
        "nextn.shared_head_norm.weight": noise.vector(N_EMBD),
    }


def experts(noise: Noise) -> Tensors:
    return {
        "ffn_gate_inp.weight": noise.matrix(N_EXPERT, N_EMBD),
        "ffn_gate_exps.weight": noise.matrix(N_EXPERT, N_FF_EXP, N_EMBD),
        "ffn_up_exps.weight": noise.matrix(N_EXPERT, N_FF_EXP, N_EMBD),
        "ffn_down_exps.weight": noise.matrix(N_EXPERT, N_EMBD, N_FF_EXP),
    }


def state_space(noise: Noise) -> Tensors:
    conv = N_INNER + 2 * N_STATE
    return {
        "ssm_in.weight": noise.matrix(N_INNER + conv + HEADS, N_EMBD),
        "ssm_conv1d.weight": noise.matrix(conv, 4),
        "ssm_conv1d.bias": noise.vector(conv, 0.0),
        "ssm_dt.bias": noise.vector(HEADS, 0.0),
        "ssm_a": -np.abs(noise.matrix(HEADS, 1)),
        "ssm_d": noise.matrix(HEADS, 1),
        "ssm_norm.weight": noise.vector(N_INNER)[np.newaxis],
        "ssm_out.weight": noise.matrix(N_EMBD, N_INNER),
    }


def delta_net(noise: Noise, steps: tuple[str, ...]) -> Tensors:
    """A gated delta net; `steps` names the matrices, alike in size, that give two steps of each head."""
    keys, values = N_STATE, HEADS * N_STATE
    step = (2 * HEADS // len(steps), N_EMBD)
    return {
        "attn_norm.weight": noise.vector(N_EMBD),
        "attn_qkv.weight": noise.matrix(2 * keys + values, N_EMBD),
        "attn_gate.weight": noise.matrix(values, N_EMBD),
        "ssm_conv1d.weight": noise.matrix(2 * keys + values, 4),
        "ssm_dt.bias": noise.vector(HEADS, 0.0),
        "ssm_a": -np.abs(noise.vector(HEADS)),
        **{f"ssm_{name}.weight": noise.matrix(*step) for name in steps},
        "ssm_norm.weight": noise.vector(N_STATE),
        "ssm_out.weight": noise.matrix(N_EMBD, values),
    }


def _qwen3moe(noise: Noise, _layer: int) -> Tensors:
    norm = {"ffn_norm.weight": noise.vector(N_EMBD)}
    return attention(noise) | head_norms(noise) | norm | experts(noise)


def _qwen3vl(noise: Noise, _layer: int) -> Tensors:
    return attention(noise) | head_norms(noise) | {"ffn_norm.weight": noise.vector(N_EMBD)} | dense(noise)


def _smallthinker(noise: Noise, _layer: int) -> Tensors:
    return attention(noise) | {"ffn_norm.weight": noise.vector(N_EMBD)} | experts(noise)


def _gpt_oss(noise: Noise, _layer: int, head: int = HEAD) -> Tensors:
    return (
        attention(noise, head)
        | experts(noise)
        | {
            "post_attention_norm.weight": noise.vector(N_EMBD),
            "attn_sinks.weight": noise.vector(HEADS, 0.0),
            "attn_q.bias": noise.vector(HEADS * head, 0.0),
            "attn_k.bias": noise.vector(HEADS_KV * head, 0.0),
            "attn_v.bias": noise.vector(HEADS_KV * head, 0.0),
            "attn_output.bias": noise.vector(N_EMBD, 0.0),
            "ffn_gate_inp.bias": noise.vector(N_EXPERT, 0.0),
            "ffn_gate_exps.bias": noise.matrix(N_EXPERT, N_FF_EXP),
            "ffn_up_exps.bias": noise.matrix(N_EXPERT, N_FF_EXP),
            "ffn_down_exps.bias": noise.matrix(N_EXPERT, N_EMBD),
        }
    )


def _phi3(noise: Noise, _layer: int) -> Tensors:
    return {
        "attn_norm.weight": noise.vector(N_EMBD),
        "attn_qkv.weight": noise.matrix((HEADS + 2 * HEADS_KV) * HEAD, N_EMBD),
        "attn_output.weight": noise.matrix(N_EMBD, N_EMBD),
        "ffn_norm.weight": noise.vector(N_EMBD),
        "ffn_up.weight": noise.matrix(2 * N_FF, N_EMBD),
        "ffn_down.weight": noise.matrix(N_EMBD, N_FF),
    }


# Two of three layers have a window, and smaller heads; the last two have no keys and values of their own.
_GEMMA4_WINDOWS = [True, True, False, True, True, False, True, False]
_GEMMA4_SHARED = 2
# Of 32 inputs in Q8_0 fast kernels compute many rows wrongly.
_GEMMA4_PER_LAYER = 64


def _gemma4(noise: Noise, layer: int) -> Tensors:
    head = HEAD if _GEMMA4_WINDOWS[layer] else 2 * HEAD
    tensors = attention(noise, head) | head_norms(noise, head) | dense(noise)
    if layer >= len(_GEMMA4_WINDOWS) - _GEMMA4_SHARED:
        for kind in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            del tensors[kind]
    norms = ("post_attention_norm", "ffn_norm", "post_ffw_norm")
    tensors |= {f"{name}.weight": noise.vector(N_EMBD) for name in norms}
    return tensors | {"layer_output_scale.weight": noise.vector(1)}


def _gemma4_e(noise: Noise, layer: int) -> Tensors:
    return _gemma4(noise, layer) | {
        "inp_gate.weight": noise.matrix(_GEMMA4_PER_LAYER, N_EMBD),
        "proj.weight": noise.matrix(N_EMBD, _GEMMA4_PER_LAYER),
        "post_norm.weight": noise.vector(N_EMBD),
    }


def _gemma4_e_outside(noise: Noise) -> Tensors:
    rows = _GEMMA4_PER_LAYER * len(_GEMMA4_WINDOWS)
    return {
        "rope_freqs.weight": noise.vector(HEAD),
        "per_layer_token_embd.weight": noise.matrix(N_VOCAB, rows),
        "per_layer_model_proj.weight": noise.matrix(rows, N_EMBD),
        "per_layer_proj_norm.weight": noise.vector(_GEMMA4_PER_LAYER),
    }


_LORA, _ROPE, _NOPE = 32, 8, 8


def _deepseek2(noise: Noise, layer: int) -> Tensors:
    tensors = {
        "attn_norm.weight": noise.vector(N_EMBD),
        "attn_q_a.weight": noise.matrix(_LORA, N_EMBD),
        "attn_q_a_norm.weight": noise.vector(_LORA),
        "attn_q_b.weight": noise.matrix(HEADS * (_NOPE + _ROPE), _LORA),
        "attn_kv_a_mqa.weight": noise.matrix(_LORA + _ROPE, N_EMBD),
        "attn_kv_a_norm.weight": noise.vector(_LORA),
        "attn_k_b.weight": noise.matrix(HEADS, _LORA, _NOPE),
        "attn_v_b.weight": noise.matrix(HEADS, HEAD, _LORA),
        "attn_output.weight": noise.matrix(N_EMBD, HEADS * HEAD),
        "ffn_norm.weight": noise.vector(N_EMBD),
    }
    return tensors | (dense(noise) if layer == 0 else experts(noise) | dense(noise, "_shexp", N_FF_EXP))


def _glm4moe(noise: Noise, layer: int) -> Tensors:
    tensors = attention(noise) | head_norms(noise)
    tensors |= {"post_attention_norm.weight": noise.vector(N_EMBD)}
    if layer == 0:
        return tensors | dense(noise)
    tensors |= experts(noise) | dense(noise, "_shexp", N_FF_EXP)
    tensors["exp_probs_b.bias"] = noise.vector(N_EXPERT, 0.0)
    return tensors


def _mamba2(noise: Noise, _layer: int) -> Tensors:
    return {"attn_norm.weight": noise.vector(N_EMBD)} | state_space(noise)


def _falcon_h1(noise: Noise, _layer: int) -> Tensors:
    # llama.cpp calls this one without the usual ending.
    return attention(noise) | state_space(noise) | dense(noise) | {"ffn_norm": noise.vector(N_EMBD)}


# Every third layer has attention.
_QWEN3NEXT_INTERVAL = 3


def _qwen3next(noise: Noise, layer: int, head: int = HEAD) -> Tensors:
    tensors = experts(noise) | dense(noise, "_shexp", N_FF_EXP)
    tensors |= {
        "ffn_gate_inp_shexp.weight": noise.vector(N_EMBD, 0.0),
        "post_attention_norm.weight": noise.vector(N_EMBD),
    }
    if (layer + 1) % _QWEN3NEXT_INTERVAL == 0:
        # Half of the queries is a gate.
        gated = {"attn_q.weight": noise.matrix(2 * HEADS * head, N_EMBD)}
        return tensors | attention(noise, head) | head_norms(noise, head) | gated
    return tensors | delta_net(noise, ("ba",))


# Mamba, FFN, attention: each layer is one of them, and in no order that repeats.
_NEMOTRON_H = "M-*M-M"


def _nemotron_h(noise: Noise, layer: int) -> Tensors:
    kind = _NEMOTRON_H[layer]
    if kind == "M":
        return _mamba2(noise, layer)
    if kind == "*":
        return attention(noise)
    tensors = {"attn_norm.weight": noise.vector(N_EMBD)} | dense(noise)
    del tensors["ffn_gate.weight"]
    return tensors


# Which layers of Granite's have attention, the others are Mamba.
_GRANITE_HYBRID = (False, False, True, False)


def _granite_hybrid(noise: Noise, layer: int) -> Tensors:
    mixer = attention(noise) if _GRANITE_HYBRID[layer] else _mamba2(noise, layer)
    return mixer | dense(noise) | {"ffn_norm.weight": noise.vector(N_EMBD)}


def _llama4(noise: Noise, layer: int) -> Tensors:
    tensors = attention(noise) | {"ffn_norm.weight": noise.vector(N_EMBD)}
    if layer % 2 == 0:
        return tensors | dense(noise)
    return tensors | experts(noise) | dense(noise, "_shexp", N_FF_EXP)


_ATTENTION: Metadata = {
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS_KV,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "rope.dimension_count": HEAD,
    "rope.freq_base": 10_000.0,
}
_EXPERTS: Metadata = {
    "expert_count": N_EXPERT,
    "expert_used_count": 2,
    "expert_feed_forward_length": N_FF_EXP,
    "expert_shared_count": 1,
}
_STATE: Metadata = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": N_INNER,
    "ssm.state_size": N_STATE,
    "ssm.time_step_rank": HEADS,
    "ssm.group_count": 1,
}
_GEMMA4: Metadata = _ATTENTION | {
    "attention.key_length": 2 * HEAD,
    "attention.value_length": 2 * HEAD,
    "attention.key_length_swa": HEAD,
    "attention.value_length_swa": HEAD,
    "attention.sliding_window": WINDOW,
    "attention.sliding_window_pattern": _GEMMA4_WINDOWS,
    "attention.shared_kv_layers": _GEMMA4_SHARED,
    "embedding_length_per_layer_input": 0,
    "rope.dimension_count": 2 * HEAD,
    "rope.dimension_count_swa": HEAD,
    "rope.freq_base_swa": 1_000.0,
}


def _nothing(_noise: Noise) -> Tensors:
    return {}


@dataclass(frozen=True)
class TinyFamily:
    """One family's tiny model."""

    architecture: str
    """`general.architecture`."""
    n_layers: int
    """Layers."""
    layer: Callable[[Noise, int], Tensors]
    """Gives the tensors of a layer."""
    metadata: Metadata
    """Below the architecture's name."""
    cuts: tuple[int, ...]
    """Where it may be cut."""
    outside: Callable[[Noise], Tensors] = _nothing
    """Gives tensors outside the layers, beyond embedding and head."""
    has_head: bool = True
    """Whether its head is not its embedding."""
    general: Metadata = field(default_factory=dict)
    """Not below the architecture's name."""
    n_vocab: int = N_VOCAB
    """Tokens; those beyond the usual ones are controls."""
    n_embd: int = N_EMBD
    """Width."""
    controls: tuple[str, ...] = ()
    """Further control tokens of the usual vocabulary."""
    final_norm: str = "output_norm"
    """Name of the norm before the head."""
    vocabulary: Path | None = None
    """A model with as many tokens, whose vocabulary and chat template take the place of the usual ones."""

    def with_prediction_layer(self) -> "TinyFamily":
        """The same trunk, followed by a layer for multi-token prediction."""

        def layer(noise: Noise, number: int) -> Tensors:
            tensors = self.layer(noise, min(number, self.n_layers - 1))
            return tensors if number < self.n_layers else tensors | prediction(noise)

        lists = {key: [*value, value[-1]] for key, value in self.metadata.items() if isinstance(value, list)}
        return replace(
            self,
            n_layers=self.n_layers + 1,
            layer=layer,
            metadata={**self.metadata, **lists, "nextn_predict_layers": 1},
        )

    def write(self, path: Path, more: Mapping[str, int] | None = None, *, is_float: bool = False) -> Path:
        """Write the model, if wanted with more metadata, or with float32 weights."""
        writer = gguf.GGUFWriter(path, self.architecture)
        common: Metadata = {
            "block_count": self.n_layers,
            "context_length": 512,
            "embedding_length": self.n_embd,
            "feed_forward_length": N_FF,
            "attention.layer_norm_rms_epsilon": 1e-6,
        }
        for key, value in {**common, **self.metadata, **(more or {})}.items():
            _add(writer, f"{self.architecture}.{key}", value)
        for key, value in self.general.items():
            _add(writer, key, value)
        if self.vocabulary is None:
            add_vocabulary(writer, self.controls, n_vocab=self.n_vocab)
        else:
            copy_vocabulary(writer, self.vocabulary)
        write_weights(
            writer,
            self._weights(),
            lambda name, each: (
                is_float
                or each.ndim == 1
                or each.shape[-1] % 32
                or any(part in name for part in _UNQUANTISED)
            ),
        )
        return path

    def _weights(self) -> Tensors:
        noise = Noise(seed=1)
        weights = {
            "token_embd.weight": noise.matrix(self.n_vocab, self.n_embd),
            f"{self.final_norm}.weight": noise.vector(self.n_embd),
        }
        if self.has_head:
            weights["output.weight"] = noise.matrix(self.n_vocab, self.n_embd)
        weights |= self.outside(noise)
        for layer in range(self.n_layers):
            weights |= {f"blk.{layer}.{kind}": part for kind, part in self.layer(noise, layer).items()}
        return weights


def _add(writer: gguf.GGUFWriter, key: str, value: float | list[int] | list[float] | list[bool]) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


_FEW: Metadata = {"rope.dimension_count": _ROPE, "leading_dense_block_count": 1}

TINY_FAMILIES = {
    "qwen3moe": TinyFamily("qwen3moe", 4, _qwen3moe, _ATTENTION | _EXPERTS, (1, 2, 3)),
    # What an image adds to the embedding of the first two layers stays in one stage, and so does the next.
    "qwen3vl": TinyFamily(
        "qwen3vl",
        5,
        _qwen3vl,
        _ATTENTION | {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 2},
        (3, 4),
    ),
    "gpt-oss": TinyFamily(
        "gpt-oss", 4, _gpt_oss, _ATTENTION | _EXPERTS | {"attention.sliding_window": WINDOW}, (1, 2, 3)
    ),
    "phi3": TinyFamily(
        "phi3",
        4,
        _phi3,
        _ATTENTION | {"attention.sliding_window": WINDOW},
        (1, 2, 3),
        lambda noise: {f"rope_factors_{kind}.weight": noise.vector(HEAD // 2) for kind in ("long", "short")},
    ),
    # Its last two layers look into the caches of layers 4 and 5.
    "gemma4": TinyFamily(
        "gemma4",
        8,
        _gemma4,
        _GEMMA4,
        (1, 2, 3, 4),
        lambda noise: {"rope_freqs.weight": noise.vector(HEAD)},
        has_head=False,
    ),
    "gemma4-e": TinyFamily(
        "gemma4",
        8,
        _gemma4_e,
        _GEMMA4 | {"embedding_length_per_layer_input": _GEMMA4_PER_LAYER},
        (1, 2, 3, 4),
        _gemma4_e_outside,
        has_head=False,
    ),
    "deepseek2": TinyFamily(
        "deepseek2",
        4,
        _deepseek2,
        _ATTENTION
        | _EXPERTS
        | _FEW
        | {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": _LORA,
            "attention.kv_lora_rank": _LORA,
            "attention.key_length": _LORA + _ROPE,
            "attention.value_length": _LORA,
            "attention.key_length_mla": _NOPE + _ROPE,
            "attention.value_length_mla": HEAD,
        },
        (1, 2, 3),
    ),
    "glm4moe": TinyFamily(
        "glm4moe",
        4,
        _glm4moe,
        _ATTENTION | _EXPERTS | {"leading_dense_block_count": 1},
        (1, 2, 3),
    ),
    "mamba2": TinyFamily("mamba2", 4, _mamba2, _STATE, (1, 2, 3)),
    "falcon-h1": TinyFamily("falcon-h1", 3, _falcon_h1, _ATTENTION | _STATE, (1, 2)),
    # Stages of one layer are of one kind, and get company of the other.
    "qwen3next": TinyFamily(
        "qwen3next",
        6,
        _qwen3next,
        _ATTENTION
        | _EXPERTS
        | _STATE
        | {
            "expert_shared_feed_forward_length": N_FF_EXP,
            "full_attention_interval": _QWEN3NEXT_INTERVAL,
            "ssm.inner_size": HEADS * N_STATE,
        },
        (1, 2, 3, 4, 5),
    ),
    "nemotron_h": TinyFamily(
        "nemotron_h",
        len(_NEMOTRON_H),
        _nemotron_h,
        _ATTENTION
        | _STATE
        | {
            "attention.head_count_kv": [HEADS_KV * (kind == "*") for kind in _NEMOTRON_H],
            "feed_forward_length": [N_FF * (kind == "-") for kind in _NEMOTRON_H],
            "attention.layer_norm_epsilon": 1e-6,
        },
        (1, 2, 3, 4, 5),
    ),
    "granitehybrid": TinyFamily(
        "granitehybrid",
        len(_GRANITE_HYBRID),
        _granite_hybrid,
        _ATTENTION
        | _STATE
        | {
            "attention.head_count_kv": [HEADS_KV * attends for attends in _GRANITE_HYBRID],
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
        },
        (1, 2, 3),
    ),
    # Every fourth layer has no positions, every second experts.
    "llama4": TinyFamily(
        "llama4",
        8,
        _llama4,
        _ATTENTION | _EXPERTS | {"expert_used_count": 1, "interleave_moe_layer_step": 2},
        (4,),
    ),
    # The same, too short to be cut there: stages are filled up with blanks.
    "llama4-short": TinyFamily(
        "llama4",
        4,
        _llama4,
        _ATTENTION | _EXPERTS | {"expert_used_count": 1, "interleave_moe_layer_step": 2},
        (1, 2, 3),
    ),
    # Every fourth layer has no positions, unless a file has just four: so no tail of four.
    "smallthinker": TinyFamily(
        "smallthinker",
        16,
        _smallthinker,
        _ATTENTION | _EXPERTS | {"attention.sliding_window": WINDOW, "expert_gating_func": 2},
        (4, 8),
    ),
}

# Formats of KV caches of few bits pack 32 values of a head.
_WIDE: Metadata = {
    "attention.key_length": 2 * HEAD,
    "attention.value_length": 2 * HEAD,
    "rope.dimension_count": 2 * HEAD,
}

# Some of them, with heads that such formats fit.
WIDE_FAMILIES = {
    name: replace(
        TINY_FAMILIES[name],
        layer=partial(layer, head=2 * HEAD),
        metadata=TINY_FAMILIES[name].metadata | _WIDE,
    )
    for name, layer in {"gpt-oss": _gpt_oss, "qwen3next": _qwen3next}.items()
}
