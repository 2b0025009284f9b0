"""Model facts: sizes and shapes of a model, from its header."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from gguf.constants import GGMLQuantizationType

from stages.layers import EXPERTS, LayerRange
from stages.slicing.architectures.layer_patterns import RECURRENT_LAYERS, recurrent_flags
from stages.slicing.layout import idle_head_bytes
from stages.slicing.source_model import read_source
from stages.slicing.tensor_names import EMBEDDING, OUTPUT, OUTPUT_BIAS, OUTPUT_NORM

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from stages.gguf import GgufHeader, TensorInfo
    from stages.slicing.source_model import SourceModel

# Names of tensors, after `blk.<layer>.`, of recurrent layers only: Mamba and the gated delta rules, RWKV,
# short convolutions.
_MARKS: Final = ("ssm_", "time_mix_", "shortconv.")
# MiniMax's lightning attention has a state without tensors of its own, in all layers but each eighth.
_MINIMAX: Final = "minimax-01"
_MINIMAX_INTERVAL: Final = 8
_TOKEN_SHIFTS: Final = 2
_KDA_KERNEL: Final = 4
# Bytes of a block in the file, and most additional bytes: sums and scales that the AMX kernels keep with each
# block (`get_row_size` in llama.cpp's amx/mmq.cpp). Other kernels add nothing.
_ADDED: Final = {
    GGMLQuantizationType.Q8_0: (34, 4),
    GGMLQuantizationType.Q4_K: (144, 4),
    GGMLQuantizationType.Q5_K: (176, 4),
    GGMLQuantizationType.IQ4_XS: (136, 2),
}


@dataclass(frozen=True)
class ModelSummary:
    """What a list of models says of a file, of any kind."""

    n_vocab: int
    """Rows of the token embedding."""
    n_ctx_train: int
    """Positions that the model was trained for."""
    file_bytes: int
    """Size of all files."""


@dataclass(frozen=True)
class FileFacts(ModelSummary):
    """Facts that the file of a model has, of any kind."""

    path: Path
    """The GGUF file, the first one if there are several."""
    architecture: str
    """`general.architecture`."""
    name: str
    """`general.name`, or the file's name."""
    n_layers: int
    """Number of layers, without those for multi-token prediction."""
    row_width: int
    """Most elements of one row during the computation of a layer."""

    @property
    def summary(self) -> ModelSummary:
        """What a list of models says of it."""
        return ModelSummary(self.n_vocab, self.n_ctx_train, self.file_bytes)


@dataclass(frozen=True)
class ModelFacts(FileFacts):
    """Sizes and shapes of a model that generates text."""

    n_embd: int
    """Width of the hidden state."""
    layer_bytes: tuple[int, ...]
    """Size of each layer's weights."""
    embedding_bytes: int
    """Size of the token embedding, on the first stage."""
    head_bytes: int
    """Size of output norm and head, on the tail; a tied embedding counts again."""
    is_tied: bool
    """Whether the embedding is the head, so that a stage with all layers holds it once."""
    kv_widths: tuple[int, ...]
    """Per layer, elements of one position in a KV cache: keys and values of all heads."""
    head_widths: tuple[int, int]
    """Elements of one key head and of one value head."""
    has_windows: bool
    """Whether some layers attend to a sliding window only."""
    allowed_cuts: tuple[int, ...]
    """Layers at which a stage may start, 0 left out."""
    state_widths: tuple[int, ...] = ()
    """Per layer, float32 elements of one sequence's recurrent state; empty if no layer is recurrent."""
    packing_bytes: tuple[int, ...] = ()
    """Per layer, bytes that its weights may take more after repacking for fast kernels; empty for none."""
    head_packing_bytes: int = 0
    """The same for the tail's tensors."""
    refused_cuts: Mapping[int, str] = field(default_factory=dict)
    """Other layers, each with the reason."""
    refused_lengths: Mapping[int, str] = field(default_factory=dict)
    """Numbers of layers that no stage may have, each with the reason."""
    can_trim: bool = True
    """Whether sessions can go back to any earlier position; those with recurrent state cannot."""
    depends_on_batch: bool = False
    """Whether rows computed together differ from rows one by one in exact mode, too."""
    n_streams: int = 1
    """Rows of hidden states that make one row on the wire."""
    num_blanks: int = 0
    """Layers that every stage but the first computes without use; see
    `stages.slicing.architectures.rule_types.Blanks`."""
    embeds_everywhere: bool = False
    """Whether every stage holds the token embedding."""
    n_prediction_layers: int = 0
    """Layers for multi-token prediction at the end of the file, which no stage holds."""
    expert_bytes: tuple[int, ...] = ()
    """Per layer, size of its experts, which are part of `layer_bytes`; empty for none."""
    idle_head_bytes: int = 0
    """Size of the head that the first of several stages has without use; see
    `stages.slicing.layout.idle_head_bytes`."""

    @property
    def layer_count(self) -> str:
        """Number of layers for messages: `48 layers`, `46 layers and 1 for multi-token prediction`."""
        if not self.n_prediction_layers:
            return f"{self.n_layers} layers"
        return f"{self.n_layers} layers and {self.n_prediction_layers} for multi-token prediction"

    def may_be_stage(self, layers: LayerRange) -> bool:
        """Whether a stage may have these layers, whose ends are allowed cuts."""
        return len(layers) == self.n_layers or len(layers) not in self.refused_lengths

    @property
    def stage_counts(self) -> frozenset[int]:
        """Possible numbers of stages."""
        edges = (0, *self.allowed_cuts, self.n_layers)
        # By last layer: numbers of stages up to there, a bit for each.
        counts = dict.fromkeys(edges, 0) | {0: 1}
        for stop_at, stop in enumerate(edges[1:], 1):
            for start in edges[:stop_at]:
                if counts[start] and self.may_be_stage(LayerRange(start, stop)):
                    counts[stop] |= counts[start] << 1
        found = counts[self.n_layers]
        return frozenset(number for number in range(1, len(edges)) if found >> number & 1)

    def may_be_stages(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.bool_]:
        """`may_be_stage` for many stages, by their first layers and last layers plus one."""
        lengths = stops - starts
        may_be: NDArray[np.bool_] = (lengths == self.n_layers) | ~np.isin(lengths, [*self.refused_lengths])
        return may_be

    @property
    def hidden_width(self) -> int:
        """Values of a row on the wire between stages."""
        return self.n_embd * self.n_streams


def state_widths(header: GgufHeader, layers: Sequence[Sequence[TensorInfo]]) -> tuple[int, ...]:
    """Float32 elements of the recurrent state of one sequence in each layer; 0 for attention alone.

    By the formulas of llama.cpp's `llama_hparams::n_embd_r` and `n_embd_s`: rows kept for a convolution, and
    the state proper.

    Args:
        header: Header of the file.
        layers: The tensors of each layer.
    """
    width = _convolution_width(header) + _state_width(header)
    return tuple(width if _is_recurrent(header, index, layer) else 0 for index, layer in enumerate(layers))


def _is_recurrent(header: GgufHeader, index: int, layer: Sequence[TensorInfo]) -> bool:
    if header.architecture == _MINIMAX:
        interval = header.integer(f"{_MINIMAX}.full_attention_interval", _MINIMAX_INTERVAL)
        return (index + 1) % max(interval, 1) != 0
    # blk.<layer>.<kind>
    return any(tensor.name.split(".", 2)[-1].startswith(_MARKS) for tensor in layer)


def _convolution_width(header: GgufHeader) -> int:
    n_embd, kernel = _number(header, "embedding_length"), _number(header, "ssm.conv_kernel")
    if _number(header, "wkv.head_size"):
        return _number(header, "token_shift_count", _TOKEN_SHIFTS) * n_embd
    if _number(header, "shortconv.l_cache"):
        return n_embd * (_number(header, "shortconv.l_cache") - 1)
    if _number(header, "kda.head_dim"):
        return 3 * ((kernel or _KDA_KERNEL) - 1) * _n_heads(header) * _number(header, "kda.head_dim")
    groups = 2 * _number(header, "ssm.group_count") * _number(header, "ssm.state_size")
    return max(kernel - 1, 0) * (_number(header, "ssm.inner_size") + groups)


def _state_width(header: GgufHeader) -> int:
    n_embd, n_heads = _number(header, "embedding_length"), _n_heads(header)
    if _number(header, "wkv.head_size"):
        return n_embd * _number(header, "wkv.head_size")
    if _number(header, "kda.head_dim"):
        return _number(header, "kda.head_dim") ** 2 * n_heads
    if header.architecture == _MINIMAX:
        return _number(header, "attention.key_length", n_embd // max(n_heads, 1)) ** 2 * n_heads
    return _number(header, "ssm.state_size") * _number(header, "ssm.inner_size")


def _number(header: GgufHeader, key: str, default: int = 0) -> int:
    """A number of the model's own metadata."""
    return header.integer(f"{header.architecture}.{key}", default)


def _n_heads(header: GgufHeader) -> int:
    """Of the first layer, as llama.cpp takes them for this; the largest number if layers differ."""
    key = f"{header.architecture}.attention.head_count"
    value = header.metadata.get(key)
    if value is None or value.count is None:
        return header.integer(key, 0)
    return max(header.per_layer(key, value.count, 0), default=0)


def packing_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Bytes that these tensors may take in fast mode beyond their size in the file."""
    return sum(
        tensor.n_bytes * added // block_bytes
        for tensor in tensors
        for block_bytes, added in [_ADDED.get(tensor.type, (1, 0))]
    )


def read_file_facts(path: Path, source: SourceModel) -> FileFacts:
    """Facts of a model's file, of any kind.

    Args:
        path: The file, the first one if there are several.
        source: Its checked header.
    """
    header = source.header
    return FileFacts(
        path=path,
        architecture=header.architecture,
        name=header.text("general.name", path.stem),
        n_layers=source.n_layers,
        n_vocab=header.tensors[EMBEDDING].shape[-1],
        n_ctx_train=header.integer(f"{header.architecture}.context_length"),
        file_bytes=header.file_bytes,
        row_width=row_width(source),
    )


def read_model_facts(path: Path) -> ModelFacts:
    """Read a model's facts from its header, in milliseconds.

    Raises:
        InvalidModel: If the file is no GGUF, truncated, or lacks a tensor.
        UncuttableModel: If its architecture cannot be cut at all.
    """
    source = read_source(path)
    header = source.header
    tensors = header.tensors
    embedding = tensors[EMBEDDING]
    head = [tensors[name] for name in (OUTPUT_NORM, OUTPUT_BIAS) if name in tensors]
    head.append(tensors.get(OUTPUT, embedding))
    cuts, widths = source.allowed_cuts, state_widths(header, source.layers)
    experts = tuple(map(_expert_bytes, source.layers))
    return ModelFacts(
        **vars(read_file_facts(path, source)),
        n_embd=header.integer(f"{header.architecture}.embedding_length"),
        layer_bytes=_layer_bytes(source),
        embedding_bytes=embedding.n_bytes,
        head_bytes=sum(tensor.n_bytes for tensor in head),
        is_tied=OUTPUT not in tensors,
        kv_widths=kv_widths(source),
        head_widths=_head_widths(source),
        has_windows=header.integer(f"{header.architecture}.attention.sliding_window", 0) > 0,
        allowed_cuts=cuts,
        state_widths=widths if any(widths) else (),
        packing_bytes=tuple(map(packing_bytes, source.layers)),
        head_packing_bytes=packing_bytes(head),
        refused_cuts=source.refused_cuts,
        refused_lengths=source.refused_lengths,
        can_trim=not source.family.has_recurrent_state,
        depends_on_batch=source.family.depends_on_batch,
        n_streams=source.family.entry.streams(header),
        num_blanks=min((source.blanks(LayerRange(cut, source.n_layers)).before for cut in cuts), default=0),
        embeds_everywhere=_embeds_everywhere(source),
        n_prediction_layers=source.n_prediction_layers,
        expert_bytes=experts if any(experts) else (),
        idle_head_bytes=idle_head_bytes(source),
    )


def _expert_bytes(layer: Iterable[TensorInfo]) -> int:
    return sum(tensor.n_bytes for tensor in layer if re.search(EXPERTS, tensor.name))


def _layer_bytes(source: SourceModel) -> tuple[int, ...]:
    """Size of each layer's tensors, with its part of those that have one for each layer."""
    tensors = source.header.tensors
    shared = sum(tensors[name].n_bytes for name in source.family.per_layer_parts if name in tensors)
    part = shared // source.n_layers
    return tuple(part + sum(tensor.n_bytes for tensor in layer) for layer in source.layers)


def _embeds_everywhere(source: SourceModel) -> bool:
    entry, layers = source.family.entry, LayerRange(source.n_layers - 1, source.n_layers)
    return entry.needs_embedding and entry.takes_tokens(source.header, layers)


def kv_widths(source: SourceModel) -> tuple[int, ...]:
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


def row_width(source: SourceModel) -> int:
    """Elements of one row in llama.cpp at a time: hidden states, queries, and the inside of the FFN.

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
