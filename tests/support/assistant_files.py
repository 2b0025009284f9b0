"""Tiny random assistants of Gemma 4, for the targets of `tests.qualification.own_models`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import gguf
from gguf.constants import GGMLQuantizationType

from tests.support.tiny_families import N_EMBD, Noise
from tests.support.tiny_models import N_VOCAB, add_vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

ARCHITECTURE: Final = "gemma4-assistant"
# Another width than the target's, which llama.cpp asks for.
WIDTH: Final = 128
_WINDOWS: Final = (True, True, True, False)
_NARROW: Final = 64
_BROAD: Final = 128
_HEADS: Final = 2
_N_FF: Final = 128


def write_assistant(
    path: Path,
    *,
    seed: int = 5,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[np.float32] | None] | None = None,
    n_vocab: int = N_VOCAB,
) -> Path:
    """Write an assistant of four layers, three of them with a window.

    Args:
        path: Where to.
        seed: Of the weights.
        metadata: Other values, below the architecture's name; None leaves one out.
        tensors: Other tensors; None leaves one out.
        n_vocab: Tokens; those beyond the usual ones are controls.
    """
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    for key, value in (_metadata() | dict(metadata or {})).items():
        _add(writer, f"{ARCHITECTURE}.{key}", value)
    add_vocabulary(writer, n_vocab=n_vocab)
    for name, weights in (_tensors(Noise(seed), n_vocab) | dict(tensors or {})).items():
        if weights is None:
            continue
        if weights.ndim == 1 or weights.shape[-1] % 32:
            writer.add_tensor(name, weights)
        else:
            packed = gguf.quants.quantize(weights, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata() -> dict[str, Any]:
    return {
        "block_count": len(_WINDOWS),
        "nextn_predict_layers": len(_WINDOWS),
        "context_length": 512,
        "embedding_length": WIDTH,
        "embedding_length_out": N_EMBD,
        "embedding_length_per_layer_input": 0,
        "feed_forward_length": _N_FF,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": [2 if is_windowed else 1 for is_windowed in _WINDOWS],
        "attention.key_length": _BROAD,
        "attention.value_length": _BROAD,
        "attention.key_length_swa": _NARROW,
        "attention.value_length_swa": _NARROW,
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [*_WINDOWS],
        "attention.shared_kv_layers": len(_WINDOWS),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": _BROAD,
        "rope.dimension_count_swa": _NARROW,
        "rope.freq_base": 10_000.0,
        "rope.freq_base_swa": 1_000.0,
    }


def _tensors(noise: Noise, n_vocab: int) -> dict[str, NDArray[np.float32] | None]:
    tensors: dict[str, NDArray[np.float32] | None] = {
        "token_embd.weight": noise.matrix(n_vocab, WIDTH),
        "output_norm.weight": noise.vector(WIDTH),
        "nextn.pre_projection.weight": noise.matrix(WIDTH, 2 * N_EMBD),
        "nextn.post_projection.weight": noise.matrix(N_EMBD, WIDTH),
        "rope_freqs.weight": noise.vector(_BROAD // 2),
    }
    for number, is_windowed in enumerate(_WINDOWS):
        head = _NARROW if is_windowed else _BROAD
        layer = {
            "attn_norm": noise.vector(WIDTH),
            "attn_q": noise.matrix(_HEADS * head, WIDTH),
            "attn_q_norm": noise.vector(head),
            "attn_output": noise.matrix(WIDTH, _HEADS * head),
            "post_attention_norm": noise.vector(WIDTH),
            "layer_output_scale": noise.vector(1),
            "ffn_norm": noise.vector(WIDTH),
            "ffn_gate": noise.matrix(_N_FF, WIDTH),
            "ffn_up": noise.matrix(_N_FF, WIDTH),
            "ffn_down": noise.matrix(WIDTH, _N_FF),
            "post_ffw_norm": noise.vector(WIDTH),
        }
        tensors |= {f"blk.{number}.{name}.weight": weights for name, weights in layer.items()}
    return tensors


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_uint32(key, value)
