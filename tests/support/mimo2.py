"""SmolLM2-135M-Instruct written as a model of architecture mimo2, with a head for multi-token prediction.

mimo2 computes what llama computes if its rows of queries and keys are in the order that its rope expects, and
if its windows are longer than any text. The head was fitted in closed form: attention and feed-forward are
zero, and `eh_proj` maps the embedding of a token and the head state before it to the next head state. It is
right at the first position in about a quarter of all cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Quantisation

from tests.support.gguf_source import GgufSource, SourceTensor

HEAD: Final = Path(__file__).parents[1] / "data" / "smollm2-135m-mtp-head.npz"
_ARCHITECTURE: Final = "mimo2"
_HEAD_WIDTH: Final = 64
_WINDOW: Final = 1 << 20


def write_mimo2(smollm2: Path, path: Path, *, has_trunk: bool = True, has_head: bool = True) -> Path:
    """Write the model.

    Args:
        smollm2: The original.
        path: Where to.
        has_trunk: Whether its own layers are in the file; without them it is a head file.
        has_head: Whether the head is.
    """
    source = GgufSource(smollm2)
    tensors = source.tensors
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    source.copy_metadata(writer, lambda key: key.startswith("tokenizer."))
    n_embd, n_heads, n_kv, n_ff, n_layers = (
        source.header.integer(f"llama.{key}")
        for key in (
            "embedding_length",
            "attention.head_count",
            "attention.head_count_kv",
            "feed_forward_length",
            "block_count",
        )
    )
    numbers = {
        "block_count": n_layers + 1,
        "nextn_predict_layers": 1,
        "context_length": 8192,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "expert_feed_forward_length": n_ff,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv,
        "attention.key_length": _HEAD_WIDTH,
        "attention.value_length": _HEAD_WIDTH,
        "attention.sliding_window": _WINDOW,
        "rope.dimension_count": _HEAD_WIDTH,
    }
    for key, number in numbers.items():
        writer.add_uint32(f"{_ARCHITECTURE}.{key}", number)
    epsilon = source.value("llama.attention.layer_norm_rms_epsilon")
    writer.add_float32(f"{_ARCHITECTURE}.attention.layer_norm_rms_epsilon", epsilon)
    for key in ("rope.freq_base", "rope.freq_base_swa"):
        writer.add_float32(f"{_ARCHITECTURE}.{key}", source.value("llama.rope.freq_base"))
    pattern = [layer % 2 == 1 for layer in range(n_layers)] + [True]
    writer.add_array(f"{_ARCHITECTURE}.attention.sliding_window_pattern", pattern)

    def put(name: str, tensor: SourceTensor, heads: int = 0) -> None:
        data = tensor.data[_rope_order(heads)] if heads else tensor.data
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=tensor.tensor_type)

    put("token_embd.weight", tensors["token_embd.weight"])
    put("output.weight", tensors["token_embd.weight"])
    put("output_norm.weight", tensors["output_norm.weight"])
    for layer in range(n_layers if has_trunk else 0):
        for part in ("attn_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "attn_output", "attn_v"):
            put(f"blk.{layer}.{part}.weight", tensors[f"blk.{layer}.{part}.weight"])
        put(f"blk.{layer}.attn_q.weight", tensors[f"blk.{layer}.attn_q.weight"], n_heads)
        put(f"blk.{layer}.attn_k.weight", tensors[f"blk.{layer}.attn_k.weight"], n_kv)
    if has_head:
        _put_head(
            writer,
            f"blk.{n_layers}.",
            n_embd,
            n_ff,
            (n_heads + 2 * n_kv) * _HEAD_WIDTH,
            n_heads * _HEAD_WIDTH,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rope_order(heads: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Rows of queries or keys: the even ones of each head, then the odd ones."""
    within = np.concatenate([np.arange(0, _HEAD_WIDTH, 2), np.arange(1, _HEAD_WIDTH, 2)])
    return np.concatenate([head * _HEAD_WIDTH + within for head in range(heads)])


def _put_head(writer: gguf.GGUFWriter, prefix: str, n_embd: int, n_ff: int, n_qkv: int, n_out: int) -> None:
    fitted = np.load(HEAD)
    zeros = {
        "attn_qkv": (n_qkv, n_embd),
        "attn_output": (n_embd, n_out),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }
    for name, shape in zeros.items():
        packed = gguf.quants.quantize(np.zeros(shape, np.float32), Quantisation.Q8_0)
        writer.add_tensor(f"{prefix}{name}.weight", packed, raw_dtype=Quantisation.Q8_0)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"{prefix}{name}.weight", np.ones(n_embd, np.float32))
    writer.add_tensor(f"{prefix}nextn.eh_proj.weight", fitted["eh_proj_q8_0"], raw_dtype=Quantisation.Q8_0)
    for name in ("enorm", "hnorm"):
        writer.add_tensor(f"{prefix}nextn.{name}.weight", fitted[name].astype(np.float32))
