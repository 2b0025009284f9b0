"""Checks of a drafter's tensors: shapes, and the map to the target's token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spanmesh_proto.errors import InvalidModel
from stages.files import ModelFile
from stages.slicing.tensor_names import EMBEDDING, OUTPUT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stages.gguf import GgufHeader
    from stages.slicing.model_facts import ModelFacts


def check_shapes(header: GgufHeader, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that tensors are there and have these shapes, fastest dimension first.

    Raises:
        InvalidModel: If one is missing or has another shape.
    """
    for name, shape in shapes.items():
        tensor = header.tensors.get(name)
        if tensor is None or tensor.shape != shape:
            found = "is missing" if tensor is None else f"has shape {tensor.shape}"
            raise InvalidModel(
                f"{header.path.name}: tensor {name} {found}, expected {shape}; convert the drafter again"
            )


def check_heads(header: GgufHeader, n_embd: int) -> tuple[int, int, int]:
    """Attention heads, those of them with keys, and values of one.

    Raises:
        InvalidModel: If there are none, or if rotary positions do not fit them.
    """
    prefix = header.architecture
    heads = header.integer(f"{prefix}.attention.head_count")
    heads_kv = header.integer(f"{prefix}.attention.head_count_kv", heads)
    if heads < 1 or heads_kv < 1:
        raise InvalidModel(f"{header.path.name} has {heads} attention heads, {heads_kv} of them with keys")
    head = header.integer(f"{prefix}.attention.key_length", n_embd // heads)
    # With 0 llama.cpp computes without end.
    if not 0 < (n_rope := header.integer(f"{prefix}.rope.dimension_count", head)) <= head or n_rope % 2:
        raise InvalidModel(f"{header.path.name} rotates {n_rope} of {head} values of an attention head")
    return heads, heads_kv, head


def check_d2t(header: GgufHeader, target: ModelFacts) -> int:
    """Check the map from the drafter's token ids to the target's; returns the number of the drafter's.

    Raises:
        InvalidModel: If it is no map of ids, or names ids that the target does not have.
    """
    d2t = header.tensors.get("d2t")
    if d2t is None:
        return target.n_vocab
    if d2t.type.name != "I64" or len(d2t.shape) != 1:
        raise InvalidModel(f"{header.path.name}: d2t is {d2t.type.name} of shape {d2t.shape}, not I64 ids")
    with ModelFile(*header.paths) as file:
        ids = np.frombuffer(file.read_at(d2t.offset_bytes, d2t.n_bytes, d2t.file), "<i8")
    if len(ids) != d2t.shape[0] or not len(ids) or ids.min() < 0 or ids.max() >= target.n_vocab:
        raise InvalidModel(
            f"{header.path.name}: d2t names token ids outside {target.name}'s vocabulary of {target.n_vocab}"
        )
    return len(ids)


def end_shapes(
    header: GgufHeader, target: ModelFacts, n_embd: int, num_own_tokens: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of embedding and head, as far as the drafter has its own."""
    shapes = {EMBEDDING: (n_embd, target.n_vocab), OUTPUT: (n_embd, num_own_tokens)}
    return {name: shape for name, shape in shapes.items() if name in header.tensors}
