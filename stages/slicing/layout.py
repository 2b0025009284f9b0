"""Layout of a stage file: its tensors and metadata.

1. The stage's layers are renumbered from 0 and `block_count` is their number.
2. Metadata arrays with one entry per layer keep the entries of the stage's layers.
3. Tensors outside the layers are small and go into every stage (norms, rope factors), except those with one
row per token: the first stage holds the embedding, the tail holds the head.
4. Where llama.cpp's loader requires one of these in a stage that never uses it, the stage gets zeros: a few
rows if it has neither, as many as the vocabulary if it has the other one.
5. Stages work with token ids, so the vocabulary's texts are left out (`tokenizer.ggml.model` = "no_vocab").
6. The size of a head, if the file leaves it to the first layer's number of heads, is written explicitly.

`stages.slicing.architectures.cutting_rules` adds what single families need, blank layers among them
(`stages.slicing.architectures.rule_types.Blanks`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from spanmesh_proto.errors import UncuttableModel
from stages.files import Region
from stages.gguf import Value, ValueType
from stages.layers import LayerRange
from stages.slicing.tensor_names import EMBEDDING, OUTPUT, OUTPUT_BIAS, is_per_layer, layer_of, renumbered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stages.gguf import GgufHeader, TensorInfo
    from stages.graph_boundary import GraphBoundary
    from stages.slicing.source_model import SourceModel

# To be raised when the file for the same source and layers changes.
FORMAT_VERSION: Final = 4
# Rows of an unused embedding. llama.cpp also copies a row of logits, one float for each, per output row of a
# stage, so few are cheap twice.
FILLER_VOCAB: Final = 8
# By size per weight, smallest first; for zeros, which any type can represent.
_FILLER_TYPES: Final = (GGMLQuantizationType.IQ1_S, GGMLQuantizationType.Q4_0, GGMLQuantizationType.F32)
# Matrices of these types may be other than factors of a product, which alone can be quantised.
_FLOATS: Final = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class StageTensor:
    """A tensor of a stage file."""

    name: str
    """In the stage file."""
    shape: tuple[int, ...]
    """Elements per dimension, fastest first."""
    type: GGMLQuantizationType
    """Quantisation."""
    n_bytes: int
    """Size without padding."""
    source: Region | None
    """Region of its bytes in the model, or None for zeros."""


@dataclass(frozen=True)
class StageLayout:
    """Content of a stage file before it is written."""

    alignment: int
    metadata: Mapping[str, Value]
    tensors: tuple[StageTensor, ...]


class _Vocabulary:
    """Tensors with one row per token, in a stage that may need none, one or both of them."""

    def __init__(self, source: SourceModel, layers: LayerRange, boundary: GraphBoundary) -> None:
        tensors = source.header.tensors
        self._embedding = tensors[EMBEDDING]
        self._output = tensors.get(OUTPUT)
        self._bias = tensors.get(OUTPUT_BIAS)
        self._falls_back = source.family.head_falls_back_to_embedding
        self._head_rows = source.family.head_rows_are_fixed
        self._is_first = layers.start == 0
        self._is_tail = layers.stop == source.n_layers
        looks_up = self._is_first or self._is_tail or boundary.takes_tokens
        self._embeds = self._is_first or (boundary.takes_tokens and source.family.entry.needs_embedding)
        self.size = self._embedding.shape[-1] if looks_up else self._rows_of_filler()

    def _rows_of_filler(self) -> int:
        # llama.cpp aborts where a head has more rows than the embedding.
        return self._output.shape[-1] if self._head_rows and self._output is not None else FILLER_VOCAB

    def tensors(self) -> list[StageTensor]:
        return [*self._embedding_and_output(), *self._output_bias()]

    def _embedding_and_output(self) -> list[StageTensor]:
        embedding, output = self._embedding, self._output
        if output is None:  # tied: the tail computes its logits with the embedding
            needed = self._embeds or self._is_tail
            return [_copied(embedding, EMBEDDING) if needed else _filler(embedding, self.size)]
        if self._is_tail and not self._embeds and self._falls_back:
            return [_copied(output, EMBEDDING)]
        kept = [_copied(embedding, EMBEDDING) if self._embeds else _filler(embedding, self.size)]
        if self._is_tail:
            kept.append(_copied(output, OUTPUT))
        elif not self._falls_back:
            kept.append(_filler(output, output.shape[-1] if self._head_rows else self.size))
        return kept

    def _output_bias(self) -> list[StageTensor]:
        if self._bias is None:
            return []
        if self._is_tail:
            return [_copied(self._bias, OUTPUT_BIAS)]
        return [] if self._falls_back else [_filler(self._bias, self.size)]


def lay_out(source: SourceModel, layers: LayerRange) -> StageLayout:
    """Layout of the stage file of some layers of a model.

    Args:
        source: The whole model.
        layers: The layers, within the model.
    """
    header, family = source.header, source.family
    blanks = source.blanks(layers)
    held = LayerRange(layers.start - blanks.before, layers.stop + blanks.after)
    boundary = family.entry.handover(header, layers, blanks)
    vocabulary = _Vocabulary(source, layers, boundary)
    left_out = family.left_out(header, held)
    tensors = [*vocabulary.tensors()]
    for tensor in header.tensors.values():
        layer = layer_of(tensor.name)
        if layer is None and tensor.name not in (EMBEDDING, OUTPUT, OUTPUT_BIAS):
            if tensor.name not in left_out:
                tensors.append(_outside(tensor, source, held))
        elif layer is not None and held.start <= layer < held.stop:
            name = renumbered(tensor.name, held.start)
            is_own = layers.start <= layer < layers.stop
            tensors.append(_copied(tensor, name) if is_own else _blank(tensor, name))
    metadata = _stage_metadata(source, held, vocabulary.size)
    for key, number in (("start", layers.start), ("stop", layers.stop), ("count", source.n_layers)):
        metadata[f"spanmesh.layer_{key}"] = Value.of(ValueType.UINT32, number)
    n_embd = header.integer(f"{header.architecture}.embedding_length")
    metadata |= {key: _encoded(value) for key, value in boundary.to_metadata(n_embd).items()}
    return StageLayout(header.alignment, metadata, tuple(tensors))


def lay_out_whole(header: GgufHeader) -> StageLayout:
    """Layout of one file with all of a model, of any kind: metadata and vocabulary included.

    Args:
        header: Header of all files of the model.
    """
    metadata = {key: value for key, value in header.metadata.items() if not key.startswith("split.")}
    tensors = tuple(_copied(tensor, tensor.name) for tensor in header.tensors.values())
    return StageLayout(header.alignment, metadata, tensors)


def _stage_metadata(source: SourceModel, held: LayerRange, n_vocab: int) -> dict[str, Value]:
    """Metadata of a file with these layers, blanks included."""
    header, architecture = source.header, source.header.architecture
    metadata: dict[str, Value | None] = {}
    for key, value in header.metadata.items():
        if key.startswith(("tokenizer.", "split.")):
            continue
        cuts = is_per_layer(key, value, architecture, source.n_layers)
        metadata[key] = value.cut(held.start, held.stop) if cuts else value
    metadata.update(_head_sizes(source))
    metadata.update(source.family.derived(header, held))
    metadata["tokenizer.ggml.model"] = Value.of(ValueType.STRING, "no_vocab")
    metadata[f"{architecture}.block_count"] = Value.of(ValueType.UINT32, len(held))
    metadata[f"{architecture}.vocab_size"] = Value.of(ValueType.UINT32, n_vocab)
    return {key: value for key, value in metadata.items() if value is not None}


def _head_sizes(source: SourceModel) -> dict[str, Value]:
    """Sizes that llama.cpp would take from the first layer's number of heads, where layers differ in it."""
    header, prefix = source.header, f"{source.header.architecture}."
    heads = header.per_layer(prefix + "attention.head_count", source.n_layers, 0)
    if len(set(heads)) == 1 or not heads[0]:
        return {}
    size = Value.of(ValueType.UINT32, header.integer(prefix + "embedding_length") // heads[0])
    keys = (prefix + "attention.key_length", prefix + "attention.value_length")
    return {key: size for key in keys if key not in header.metadata}


def _encoded(value: str | int | bool) -> Value:  # noqa: FBT001 - metadata are of any type
    if isinstance(value, bool):
        return Value.of(ValueType.BOOL, value)
    return Value.of(ValueType.STRING if isinstance(value, str) else ValueType.UINT32, value)


def _outside(tensor: TensorInfo, source: SourceModel, held: LayerRange) -> StageTensor:
    """A tensor outside the layers; one with a part for each layer keeps those of the held ones."""
    dimension = source.family.per_layer_parts.get(tensor.name)
    if dimension is None:
        return _copied(tensor, tensor.name)
    extent = tensor.shape[dimension] // source.n_layers
    shape = tuple(
        extent * len(held) if place == dimension else size for place, size in enumerate(tensor.shape)
    )
    block_elements, block_bytes = GGML_QUANT_SIZES[tensor.type]
    inner = math.prod(tensor.shape[:dimension]) * extent
    if inner % block_elements:
        raise UncuttableModel(
            f"{source.header.path.name} cannot be cut: {tensor.name} has {inner} weights per layer, which "
            f"share blocks of {block_elements} in {tensor.type.name}; quantise it to another type"
        )
    part_bytes = inner // block_elements * block_bytes
    row_bytes, stride_bytes = part_bytes * len(held), part_bytes * source.n_layers
    num_bytes = row_bytes * math.prod(tensor.shape[dimension + 1 :])
    start = tensor.offset_bytes + part_bytes * held.start
    is_whole = row_bytes in (stride_bytes, num_bytes)
    region = Region(tensor.file, start, num_bytes, *(() if is_whole else (row_bytes, stride_bytes)))
    return StageTensor(tensor.name, shape, tensor.type, num_bytes, region)


def _blank(tensor: TensorInfo, name: str) -> StageTensor:
    """Zeros in the shape of a tensor, in the smallest type that fits a matrix."""
    kinds = _FILLER_TYPES if len(tensor.shape) > 1 and tensor.type.name not in _FLOATS else ()
    kind = next((kind for kind in kinds if tensor.shape[0] % GGML_QUANT_SIZES[kind][0] == 0), tensor.type)
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    return StageTensor(
        name, tensor.shape, kind, math.prod(tensor.shape) // block_elements * block_bytes, None
    )


def _filler(tensor: TensorInfo, rows: int) -> StageTensor:
    """Zeros in the shape of `tensor`, with another number of rows, in the smallest type that fits."""
    shape = (*tensor.shape[:-1], rows)
    kinds = _FILLER_TYPES if len(shape) > 1 and rows > FILLER_VOCAB else (GGMLQuantizationType.F32,)
    kind = next(kind for kind in kinds if shape[0] % GGML_QUANT_SIZES[kind][0] == 0)
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    n_elements = rows * (tensor.shape[0] if len(shape) > 1 else 1)
    return StageTensor(tensor.name, shape, kind, n_elements // block_elements * block_bytes, None)


def idle_head_bytes(source: SourceModel) -> int:
    """Size of the head in the file of the first of several stages, with which nothing is computed.

    llama.cpp puts it where the last layer is: a second copy of the embedding if it takes that as the head,
    otherwise zeros.
    """
    tensors = source.header.tensors
    embedding, output = tensors[EMBEDDING], tensors.get(OUTPUT)
    if output is None or source.family.head_falls_back_to_embedding:
        return embedding.n_bytes
    return _filler(output, embedding.shape[-1]).n_bytes


def _copied(tensor: TensorInfo, name: str) -> StageTensor:
    source = Region(tensor.file, tensor.offset_bytes, tensor.n_bytes)
    return StageTensor(name, tensor.shape, tensor.type, tensor.n_bytes, source)
