"""A drafter to begin with: the demo's trained one for the demo's model, or an untrained EAGLE-3 drafter.

The untrained one is made of the model's last layer. Both halves of its attention, for tokens and for
features, are that layer's, and so is its feed-forward network; of the features the last one passes. It
foretells next to nothing before it has learned.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mesh.draft.drafter import read_drafter
from mesh.tuning.drafter_file import (
    FEATURE_NORM,
    Eagle3Shape,
    Eagle3Weights,
    TensorRows,
    has_head_of,
    head_rows,
    read_weights,
    write_new,
)
from spanmesh_proto.errors import ModelError, UncuttableModel
from stages.gguf import Value, ValueType, read_header
from stages.slicing.model_facts import read_model_facts
from stages.slicing.tensor_names import OUTPUT_NORM

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.gguf import GgufHeader

DEMO_DRAFTER: Final = Path(__file__).parents[1] / "draft" / "smollm2-135m-eagle3.gguf"
"""Drafter for SmolLM2-135M-Instruct, trained on that model's own answers."""
# As llama.cpp's converter chooses them: the inputs of the third layer, the middle one, the last but two.
_LEAST_LAYERS: Final = 6
# Of matrices that the model's last layer does not have in this shape.
_SPREAD: Final = 0.02
# Architectures that rotate neighbouring pairs, as EAGLE-3 drafters do; of others the order would differ.
_PAIRED: Final = frozenset(
    {"llama", "mistral3", "smollm3", "granite", "internlm2", "minicpm", "arcee", "ernie4_5", "olmo"}
)
_SEED: Final = 0


class _LastLayer:
    """Tensors of a model's last layer, where they have the shape that is wanted."""

    def __init__(self, header: GgufHeader, layer: int) -> None:
        self._header = header
        self._prefix = f"blk.{layer}."
        self._noise = np.random.default_rng(_SEED)

    def matrix(self, name: str, num_rows: int, num_columns: int) -> NDArray[np.float32]:
        found = self._tensor(name, (num_columns, num_rows))
        if found is not None:
            return found
        return self._noise.normal(0.0, _SPREAD, (num_rows, num_columns)).astype(np.float32)

    def norm(self, name: str, width: int) -> NDArray[np.float32]:
        found = self._tensor(name, (width,))
        return np.ones(width, np.float32) if found is None else found[0]

    def _tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
        tensor = self._header.tensors.get(name) or self._header.tensors.get(self._prefix + name)
        return None if tensor is None or tensor.shape != shape else TensorRows(self._header, tensor).rows()


def is_of_demo(target: Path) -> bool:
    """Whether the demo's drafter is a model's own: whether its head is the model's, quantisation apart.

    Args:
        target: The model's file.

    Raises:
        ModelError: If it is no model.
    """
    facts, header = read_model_facts(target), read_header(target)
    try:
        drafter = read_drafter(DEMO_DRAFTER, facts)
    except ModelError:
        return False
    return has_head_of(read_weights(drafter, header), head_rows(header), facts.n_embd)


def write_beginning(path: Path, target: Path, num_tokens: int, layers: tuple[int, ...] | None = None) -> None:
    """Write a drafter that is to be tuned.

    Args:
        path: Where to.
        target: The model's file.
        num_tokens: Tokens that it drafts, those with the lowest ids; tuning chooses others.
        layers: Three layers whose inputs it reads; as llama.cpp's converter chooses them unless given.

    Raises:
        ModelError: If no drafter can read the model's hidden states, or the file cannot be written.
    """
    facts, header = read_model_facts(target), read_header(target)
    if facts.n_layers < _LEAST_LAYERS:
        raise UncuttableModel(f"{facts.name} has {facts.layer_count}: a drafter reads three of at least six")
    shape, n_ff = _sizes(header, facts.n_layers, facts.n_embd)
    layers = layers or (2, facts.n_layers // 2, facts.n_layers - 3)
    token_ids = np.arange(min(num_tokens, facts.n_vocab), dtype=np.int64)
    weights = Eagle3Weights(
        shape=shape,
        trained=_trained(_LastLayer(header, facts.n_layers - 1), shape, n_ff, facts.architecture),
        head=head_rows(header).rows(token_ids),
        token_ids=token_ids,
        rope_factors=None,
    )
    write_new(path, weights, _metadata(header, shape, n_ff, layers, facts.n_vocab))
    try:
        read_drafter(path, facts)
    except BaseException:
        path.unlink()
        raise


def _sizes(header: GgufHeader, n_layers: int, n_embd: int) -> tuple[Eagle3Shape, int]:
    """Sizes of the last layer, and of its feed-forward network."""
    prefix = header.architecture
    heads = header.per_layer(f"{prefix}.attention.head_count", n_layers, 0)[-1] or max(1, n_embd // 64)
    heads_kv = header.per_layer(f"{prefix}.attention.head_count_kv", n_layers, heads)[-1] or heads
    head = header.integer(f"{prefix}.attention.key_length", n_embd // heads)
    n_ff = header.per_layer(f"{prefix}.feed_forward_length", n_layers, 0)[-1] or 4 * n_embd
    shape = Eagle3Shape(
        n_embd=n_embd,
        n_heads=heads,
        n_heads_kv=heads_kv,
        head_width=head,
        n_rot=min(head, header.integer(f"{prefix}.rope.dimension_count", head)),
        rope_base=header.number(f"{prefix}.rope.freq_base", 10_000.0),
        rope_scale=1.0,
        norm_eps=header.number(f"{prefix}.attention.layer_norm_rms_epsilon", 1e-5),
        norm_before_fc=True,
        norm_before_residual=False,
    )
    return shape, n_ff


def _trained(
    layer: _LastLayer, shape: Eagle3Shape, n_ff: int, architecture: str
) -> dict[str, NDArray[np.float32]]:
    n_embd = shape.n_embd
    attended, kept = shape.n_heads * shape.head_width, shape.n_heads_kv * shape.head_width
    rotated = ("attn_q.weight", "attn_k.weight") if architecture in _PAIRED else ("", "")
    query = layer.matrix(rotated[0], attended, n_embd)
    key = layer.matrix(rotated[1], kept, n_embd)
    value = layer.matrix("attn_v.weight", kept, n_embd)
    norm = layer.norm("attn_norm.weight", n_embd)
    # Of three features side by side the last.
    joining = np.zeros((n_embd, 3 * n_embd), np.float32)
    joining[:, 2 * n_embd :] = np.eye(n_embd, dtype=np.float32)
    return {
        FEATURE_NORM: np.ones(3 * n_embd, np.float32),
        "fc.weight": joining,
        "output_norm.weight": layer.norm(OUTPUT_NORM, n_embd),
        "blk.0.attn_norm.weight": norm,
        "blk.0.attn_norm_2.weight": norm,
        "blk.0.attn_q.weight": _halved(query),
        "blk.0.attn_k.weight": _halved(key),
        "blk.0.attn_v.weight": _halved(value),
        "blk.0.attn_output.weight": layer.matrix("attn_output.weight", n_embd, attended),
        "blk.0.ffn_norm.weight": layer.norm("ffn_norm.weight", n_embd),
        "blk.0.ffn_gate.weight": layer.matrix("ffn_gate.weight", n_ff, n_embd),
        "blk.0.ffn_up.weight": layer.matrix("ffn_up.weight", n_ff, n_embd),
        "blk.0.ffn_down.weight": layer.matrix("ffn_down.weight", n_embd, n_ff),
    }


def _halved(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same for tokens and for features, half each."""
    return np.concatenate([matrix, matrix], 1) * np.float32(0.5)


def _metadata(
    header: GgufHeader, shape: Eagle3Shape, n_ff: int, layers: tuple[int, ...], n_vocab: int
) -> dict[str, Value]:
    integers: dict[str, Any] = {
        "block_count": 1,
        "context_length": header.integer(f"{header.architecture}.context_length", 8192),
        "embedding_length": shape.n_embd,
        "feed_forward_length": n_ff,
        "vocab_size": n_vocab,
        "target_hidden_size": shape.n_embd,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_heads_kv,
        "attention.key_length": shape.head_width,
        "attention.value_length": shape.head_width,
        "rope.dimension_count": shape.n_rot,
    }
    found = {"general.architecture": Value.of(ValueType.STRING, "eagle3")}
    found |= {f"eagle3.{key}": Value.of(ValueType.UINT32, value) for key, value in integers.items()}
    return {
        **found,
        "eagle3.attention.layer_norm_rms_epsilon": Value.of(ValueType.FLOAT32, shape.norm_eps),
        "eagle3.rope.freq_base": Value.of(ValueType.FLOAT32, shape.rope_base),
        "eagle3.target_layers": Value.array(ValueType.INT32, layers),
        "eagle3.norm_before_fc": Value.of(ValueType.BOOL, shape.norm_before_fc),
        "eagle3.norm_before_residual": Value.of(ValueType.BOOL, shape.norm_before_residual),
        **{key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")},
    }
