"""Embedding model file: pooling and sizes of a GGUF that makes a vector of a text, and limits of its batches.

llama.cpp pools the hidden states of a text into one vector; the file's metadata say how (`pooling_type`). All
of a text must be in one pass: pooling sees one pass only, and attention that is not causal needs the whole
text. So a batch has room for the longest text. Short texts share a batch up to a few hundred tokens; larger
batches would gain little and delay the answers to all texts in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ClusterError, InvalidModel
from stages.gguf import read_header
from stages.slicing.architectures.cutting_rules import family_of
from stages.slicing.model_facts import (
    FileFacts,
    kv_widths,
    packing_bytes,
    read_file_facts,
    state_widths,
)
from stages.slicing.source_model import SourceModel, count_layers, require_tensors, tensors_by_layer
from stages.slicing.tensor_names import EMBEDDING, trunk_of

if TYPE_CHECKING:
    from pathlib import Path

    from stages.gguf import GgufHeader

POOLINGS: Final = {1: "mean", 2: "cls", 3: "last"}
"""llama.cpp's `pooling_type`, where it makes one vector of a text."""

_RANK: Final = 4
_UNSPECIFIED: Final = -1
# llama.cpp makes no cache for these, and no logits (`llama_model::create_memory`): they read a text at once.
_WITHOUT_CACHE: Final = frozenset(
    {
        "bert",
        "eurobert",
        "gemma-embedding",
        "jina-bert-v2",
        "jina-bert-v3",
        "modern-bert",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
    }
)
# Of those without a cache, these have layers with a window: every so many layers one has none, the first or
# the last of them (`load_swa_pattern`), unless the file says otherwise.
_WINDOW_PERIODS: Final = {"gemma-embedding": (6, False), "modern-bert": (3, True)}
_DEFAULT_LONGEST: Final = 2048
# llama.cpp rounds caches up to multiples of this, and graphs of some models want rows in multiples of texts.
_ROWS_AT_ONCE: Final = 256
_SHARED_ROWS: Final = 512
_MOST_TEXTS: Final = 64


@dataclass(frozen=True)
class EmbeddingFacts(FileFacts):
    """Sizes and shapes of an embedding model."""

    width: int
    """Numbers of a vector."""
    pooling: str
    """How a text becomes one vector: `mean`, `cls` or `last`."""
    weight_bytes: int
    """Size of all tensors."""
    lookup_bytes: int
    """Size of the token embedding."""
    packing_bytes: int
    """Most bytes that weights take more in the layout of fast kernels."""
    cache_width: int
    """Elements of the KV cache for each position, all layers together; 0 without a cache."""
    state_width: int
    """Float32 elements of the recurrent state of one text; 0 without one."""
    num_masks: int
    """Attention masks of a batch: two where some layers have a window."""
    has_logits: bool
    """Whether llama.cpp computes logits, which are not read, as well."""


@dataclass(frozen=True)
class BatchLimits:
    """Limits of texts and batches."""

    longest: int
    """Most tokens of one text."""
    most_texts: int
    """Most texts of one batch."""

    @property
    def most_rows(self) -> int:
        """Most tokens of one batch: room for the longest text, a multiple of what llama.cpp rounds to."""
        return -(-max(self.longest, _SHARED_ROWS) // _ROWS_AT_ONCE) * _ROWS_AT_ONCE

    @property
    def shared_rows(self) -> int:
        """Tokens up to which texts share a batch; a longer one has a batch of its own."""
        return _SHARED_ROWS


def limits_of(model: EmbeddingFacts, ctx_size: int | None) -> BatchLimits:
    """Limits of a model's batches.

    Args:
        model: The model.
        ctx_size: Most tokens of a text; None for what it was trained for, at most 2048.

    Raises:
        ClusterError: If it was not trained for so many.
    """
    if ctx_size is not None and ctx_size > model.n_ctx_train:
        raise ClusterError(
            f"--ctx-size is {ctx_size}, and {model.name} was trained for texts of at most "
            f"{model.n_ctx_train} tokens: give less, or leave it out",
            param="--ctx-size",
        )
    longest = ctx_size or min(model.n_ctx_train, _DEFAULT_LONGEST)
    # A recurrent state is computed text by text in any case, and each text of a batch would need one.
    return BatchLimits(longest, 1 if model.state_width else _MOST_TEXTS)


def read_embedding_facts(path: Path) -> EmbeddingFacts:
    """Read an embedding model's facts from its header, in milliseconds.

    Raises:
        InvalidModel: If the file is no GGUF, truncated, lacks a tensor, makes no vectors of texts, or is one
            that llama.cpp loads and then fails to compute.
    """
    header = read_header(path)
    pooling = _pooling(header)
    trunk = trunk_of(header)
    n_layers = count_layers(trunk)
    layers = tensors_by_layer(trunk, n_layers)
    require_tensors(header, (EMBEDDING,))
    _require_both_masks(header, n_layers)
    architecture, tensors = header.architecture, header.tensors
    source = SourceModel(trunk, family_of(architecture), layers)
    has_cache = architecture not in _WITHOUT_CACHE
    n_embd = header.integer(f"{architecture}.embedding_length")
    return EmbeddingFacts(
        **vars(read_file_facts(path, source)),
        width=header.integer(f"{architecture}.embedding_length_out", 0) or n_embd,
        pooling=pooling,
        weight_bytes=sum(tensor.n_bytes for tensor in tensors.values()),
        lookup_bytes=tensors[EMBEDDING].n_bytes,
        packing_bytes=packing_bytes(tensors.values()),
        cache_width=sum(kv_widths(source)) if has_cache else 0,
        state_width=sum(state_widths(trunk, layers)),
        num_masks=2 if header.integer(f"{architecture}.attention.sliding_window", 0) > 0 else 1,
        has_logits=has_cache,
    )


def _require_both_masks(header: GgufHeader, n_layers: int) -> None:
    """Check that attention uses all masks that llama.cpp fills.

    Without a cache it fills the mask of layers with a window and that of the others, and aborts the process
    if no layer reads one of them: that mask has no memory then.

    Raises:
        InvalidModel: If all layers of such a model have a window, or none has.
    """
    architecture = header.architecture
    if architecture not in _WINDOW_PERIODS:
        return
    if architecture == "modern-bert" and not header.integer(f"{architecture}.attention.sliding_window", 0):
        return
    period, is_dense_first = _WINDOW_PERIODS[architecture]
    key = f"{architecture}.attention.sliding_window_pattern"
    value = header.metadata.get(key)
    if value is not None and value.count is not None:
        windows = {bool(flag) for flag in header.per_layer(key, n_layers, 0)}
    else:
        period = header.integer(key, period)
        without = 0 if is_dense_first else period - 1
        windows = {not period or layer % period != without for layer in range(n_layers)}
    if windows != {True, False}:
        have = "all layers have" if True in windows else "no layer has"
        raise InvalidModel(
            f"{header.path.name}: {have} a sliding window, and llama.cpp computes {architecture} only with "
            f"layers of both kinds: take a whole model, or correct {key}"
        )


def _pooling(header: GgufHeader) -> str:
    """Pooling of a text's rows to one vector.

    Raises:
        InvalidModel: If it does not, with what it is for.
    """
    name, key = header.path.name, f"{header.architecture}.pooling_type"
    if "spanmesh.layer_count" in header.metadata:
        raise InvalidModel(f"{header.path} is a stage of a model: name the whole model's file")
    # neo-bert's last norm is called enc.output_norm.
    if any(tensor.startswith(("enc.blk.", "dec.")) for tensor in header.tensors):
        raise InvalidModel(
            f"{name} has an encoder of its own, which llama.cpp does not pool: take another model"
        )
    number = header.integer(key, _UNSPECIFIED)
    if number == _RANK:
        raise InvalidModel(
            f"{name} ranks texts ({key} is {_RANK}) and makes no vectors of them: take an embedding model"
        )
    if number not in POOLINGS:
        # A writer may have put -1 into an unsigned number.
        state = f"has no {key}" if number == _UNSPECIFIED else f"has {key} {number}, which is none"
        raise InvalidModel(
            f"{name} {state}, so nothing says how a text becomes one vector: take a GGUF of an embedding "
            "model, or leave out --embeddings to serve it for chats"
        )
    return POOLINGS[number]
