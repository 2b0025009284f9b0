"""Tiny random assistants of Gemma 4, for the targets of `tests.qualification.own_models`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import gguf

from stages.gguf import read_header
from tests.support.gemma4_shape import Gemma4Shape
from tests.support.tiny_families import N_EMBD, Noise
from tests.support.tiny_models import N_VOCAB, add_vocabulary, copy_vocabulary, write_weights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

ARCHITECTURE: Final = "gemma4-assistant"
# Another width than the target's, which llama.cpp asks for.
WIDTH: Final = 128
WINDOWS: Final = (True, True, True, False)
"""Of published ones: which layers have a window."""
_TINY: Final = Gemma4Shape(WINDOWS, n_embd=WIDTH, heads=2)


def write_assistant(
    path: Path,
    *,
    seed: int = 5,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[np.float32] | None] | None = None,
    n_vocab: int = N_VOCAB,
    shape: Gemma4Shape = _TINY,
    target: Path | None = None,
) -> Path:
    """Write an assistant of four layers, three of them with a window.

    Args:
        path: Where to.
        seed: Of the weights.
        metadata: Other values, below the architecture's name; None leaves one out.
        tensors: Other tensors; None leaves one out.
        n_vocab: Tokens; those beyond the usual ones are controls.
        shape: Of the assistant.
        target: A model in place of a tiny one, whose width and vocabulary it takes.
    """
    n_embd_out = N_EMBD
    if target is not None:
        header = read_header(target)
        n_embd_out = header.integer("gemma4.embedding_length")
        n_vocab = header.metadata["tokenizer.ggml.tokens"].count or 0
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    for key, value in (_metadata(shape, n_embd_out) | dict(metadata or {})).items():
        _add(writer, f"{ARCHITECTURE}.{key}", value)
    if target is None:
        add_vocabulary(writer, n_vocab=n_vocab)
    else:
        copy_vocabulary(writer, target)
    own = _tensors(Noise(seed), shape, n_embd_out, n_vocab) | dict(tensors or {})
    kept = {name: weights for name, weights in own.items() if weights is not None}
    write_weights(writer, kept, lambda _name, weights: weights.ndim == 1 or weights.shape[-1] % 32)
    return path


def _metadata(shape: Gemma4Shape, n_embd_out: int) -> dict[str, Any]:
    return {
        **shape.metadata(),
        "nextn_predict_layers": len(shape.windows),
        "embedding_length_out": n_embd_out,
        "attention.shared_kv_layers": len(shape.windows),
    }


def _tensors(
    noise: Noise, shape: Gemma4Shape, n_embd_out: int, n_vocab: int
) -> dict[str, NDArray[np.float32] | None]:
    width, n_ff = shape.n_embd, shape.n_ff
    tensors: dict[str, NDArray[np.float32] | None] = {
        "token_embd.weight": noise.matrix(n_vocab, width),
        "output_norm.weight": noise.vector(width),
        "nextn.pre_projection.weight": noise.matrix(width, 2 * n_embd_out),
        "nextn.post_projection.weight": noise.matrix(n_embd_out, width),
        "rope_freqs.weight": noise.vector(shape.broad // 2),
    }
    for number in range(len(shape.windows)):
        head = shape.head(number)
        layer = {
            "attn_norm": noise.vector(width),
            "attn_q": noise.matrix(shape.heads * head, width),
            "attn_q_norm": noise.vector(head),
            "attn_output": noise.matrix(width, shape.heads * head),
            "post_attention_norm": noise.vector(width),
            "layer_output_scale": noise.vector(1),
            "ffn_norm": noise.vector(width),
            "ffn_gate": noise.matrix(n_ff, width),
            "ffn_up": noise.matrix(n_ff, width),
            "ffn_down": noise.matrix(width, n_ff),
            "post_ffw_norm": noise.vector(width),
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
