"""What planning needs to know about a model, from its header alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from stages.cutting.packing import packing_bytes
from stages.cutting.recurrent import state_widths
from stages.cutting.source_model import read_source
from stages.cutting.tensors import EMBEDDING, OUTPUT, OUTPUT_BIAS, OUTPUT_NORM
from stages.layers import LayerRange
from stages.slicing.architectures.layer_patterns import RECURRENT_LAYERS, recurrent_flags

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from stages.cutting.source_model import SourceModel


@dataclass(frozen=True)
class ModelFacts:
    """A model in numbers.

    Attributes:
        path: The GGUF file.
        architecture: `general.architecture`.
        name: `general.name`, or the file's name.
        n_layers: Layers.
        n_embd: Width of the hidden state.
        n_vocab: Rows of the token embedding.
        n_ctx_train: Positions that the model was trained for.
        file_bytes: Size of the file.
        layer_bytes: Weights of each layer.
        embedding_bytes: The token embedding, which the first stage holds.
        head_bytes: Output norm and head, which the tail holds; a tied embedding counts again.
        is_tied: Whether the embedding is the head, so that a stage with all layers holds it once.
        kv_widths: Per layer, elements that one position takes in a KV cache: keys and values of all heads.
        head_widths: Elements of one key head and of one value head.
        row_width: Elements that one row takes while a layer is computed, at most.
        has_windows: Whether some layers attend to a sliding window only.
        allowed_cuts: Layers at which a stage may start, 0 left out.
        state_widths: Per layer, float32 elements that one sequence takes however long it is; none at all if
            no layer is recurrent.
        packing_bytes: Per layer, what its weights may take more once fast kernels have put them in their own
            order; none at all if that is nothing.
        head_packing_bytes: The same of what the tail holds.
        refused_cuts: The others, each with the reason.
        refused_lengths: How many layers no stage may have, each with the reason.
        can_trim: Whether sessions can go back to an earlier position; those with recurrent state cannot.
        n_streams: How many rows of hidden states make one that crosses from stage to stage.
        num_blanks: Layers that every stage but the first computes in vain; see
            `stages.slicing.architectures.rules.Blanks`.
        embeds_everywhere: Whether every stage holds the token embedding.
    """

    path: Path
    architecture: str
    name: str
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    file_bytes: int
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    is_tied: bool
    kv_widths: tuple[int, ...]
    head_widths: tuple[int, int]
    row_width: int
    has_windows: bool
    allowed_cuts: tuple[int, ...]
    state_widths: tuple[int, ...] = ()
    packing_bytes: tuple[int, ...] = ()
    head_packing_bytes: int = 0
    refused_cuts: Mapping[int, str] = field(default_factory=dict)
    refused_lengths: Mapping[int, str] = field(default_factory=dict)
    can_trim: bool = True
    n_streams: int = 1
    num_blanks: int = 0
    embeds_everywhere: bool = False

    def may_be_stage(self, layers: LayerRange) -> bool:
        """Whether a stage may have just these layers, which start and stop where the model may be cut."""
        return len(layers) == self.n_layers or len(layers) not in self.refused_lengths

    @property
    def stage_counts(self) -> frozenset[int]:
        """Into how many stages it can be cut."""
        edges = (0, *self.allowed_cuts, self.n_layers)
        # By the layer behind a way: numbers of stages on it, a bit for each.
        counts = dict.fromkeys(edges, 0) | {0: 1}
        for stop_at, stop in enumerate(edges[1:], 1):
            for start in edges[:stop_at]:
                if counts[start] and self.may_be_stage(LayerRange(start, stop)):
                    counts[stop] |= counts[start] << 1
        found = counts[self.n_layers]
        return frozenset(number for number in range(1, len(edges)) if found >> number & 1)

    def may_be_stages(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The same of many at once, by their first layers and those behind their last."""
        lengths = stops - starts
        may_be: NDArray[np.bool_] = (lengths == self.n_layers) | ~np.isin(lengths, [*self.refused_lengths])
        return may_be

    @property
    def hidden_width(self) -> int:
        """Values of a row that crosses from stage to stage."""
        return self.n_embd * self.n_streams


def read_model_facts(path: Path) -> ModelFacts:
    """Read a model's facts from its header, in milliseconds.

    Raises:
        InvalidModel: If the file is no GGUF, truncated, or lacks a tensor.
        UncuttableModel: If its architecture cannot be cut at all.
    """
    source = read_source(path)
    header = source.header
    tensors = header.tensors
    architecture = header.architecture
    embedding = tensors[EMBEDDING]
    head = [tensors[name] for name in (OUTPUT_NORM, OUTPUT_BIAS) if name in tensors]
    head.append(tensors.get(OUTPUT, embedding))
    cuts, widths = source.allowed_cuts, state_widths(header, source.layers)
    return ModelFacts(
        path=path,
        architecture=architecture,
        name=header.text("general.name", path.stem),
        n_layers=source.n_layers,
        n_embd=header.integer(f"{architecture}.embedding_length"),
        n_vocab=embedding.shape[-1],
        n_ctx_train=header.integer(f"{architecture}.context_length"),
        file_bytes=header.file_bytes,
        layer_bytes=_layer_bytes(source),
        embedding_bytes=embedding.n_bytes,
        head_bytes=sum(tensor.n_bytes for tensor in head),
        is_tied=OUTPUT not in tensors,
        kv_widths=_kv_widths(source),
        head_widths=_head_widths(source),
        row_width=_row_width(source),
        has_windows=header.integer(f"{architecture}.attention.sliding_window", 0) > 0,
        allowed_cuts=cuts,
        state_widths=widths if any(widths) else (),
        packing_bytes=tuple(map(packing_bytes, source.layers)),
        head_packing_bytes=packing_bytes(head),
        refused_cuts=source.refused_cuts,
        refused_lengths=source.refused_lengths,
        can_trim=not source.family.has_recurrent_state,
        n_streams=source.family.entry.streams(header),
        num_blanks=min((source.blanks(LayerRange(cut, source.n_layers)).before for cut in cuts), default=0),
        embeds_everywhere=_embeds_everywhere(source),
    )


def _layer_bytes(source: SourceModel) -> tuple[int, ...]:
    """Tensors of each layer, and its part of those that have one for each."""
    tensors = source.header.tensors
    shared = sum(tensors[name].n_bytes for name in source.family.per_layer_parts if name in tensors)
    part = shared // source.n_layers
    return tuple(part + sum(tensor.n_bytes for tensor in layer) for layer in source.layers)


def _embeds_everywhere(source: SourceModel) -> bool:
    entry, layers = source.family.entry, LayerRange(source.n_layers - 1, source.n_layers)
    return entry.needs_embedding and entry.takes_tokens(source.header, layers)


def _kv_widths(source: SourceModel) -> tuple[int, ...]:
    """A key and a value per KV head and layer. Layers without attention have 0 heads, or a flag."""
    header, n_layers = source.header, source.n_layers
    heads = _head_counts(source)
    key = f"{header.architecture}.attention.head_count_kv"
    if key in header.metadata:
        heads = header.per_layer(key, n_layers, 0)
    if RECURRENT_LAYERS in source.family.rules:
        recurrent = recurrent_flags(header)
        heads = tuple(0 if flag else count for flag, count in zip(recurrent, heads, strict=True))
    return tuple(count * sum(_head_widths(source)) for count in heads)


def _head_widths(source: SourceModel) -> tuple[int, int]:
    header = source.header
    prefix = f"{header.architecture}.attention."
    n_embd_head = header.integer(f"{header.architecture}.embedding_length") // max(*_head_counts(source), 1)
    return header.integer(prefix + "key_length", n_embd_head), header.integer(
        prefix + "value_length", n_embd_head
    )


def _head_counts(source: SourceModel) -> tuple[int, ...]:
    header = source.header
    return header.per_layer(f"{header.architecture}.attention.head_count", source.n_layers, 0)


def _row_width(source: SourceModel) -> int:
    """What llama.cpp keeps at a time of one row: hidden states, queries, and the inside of the FFN.

    Measured: 12 x 576 for SmolLM2-135M and 14 x 640 for Gemma-3-270m; this gives half as much again.
    """
    header = source.header
    prefix = f"{header.architecture}."
    n_ff = max(header.per_layer(prefix + "feed_forward_length", source.n_layers, 0))
    n_used = max(header.per_layer(prefix + "expert_used_count", source.n_layers, 0))
    n_ff_expert = max(header.per_layer(prefix + "expert_feed_forward_length", source.n_layers, n_ff))
    n_ff_experts = n_used * n_ff_expert + header.integer(prefix + "expert_shared_feed_forward_length", 0)
    queries = max(_head_counts(source)) * _head_widths(source)[0]
    return 4 * max(n_ff, n_ff_experts) + 6 * header.integer(prefix + "embedding_length") + 2 * queries
