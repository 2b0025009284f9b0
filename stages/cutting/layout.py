"""What a stage file holds: the generic rules of cutting, as pure functions.

1. The stage's layers are renumbered from 0 and `block_count` is their number.
2. Metadata arrays with one entry per layer keep the entries of the stage's layers.
3. Tensors outside the layers are small and go into every stage (norms, rope factors), all but those with one
   row per token: the first stage holds the embedding, the tail holds the head.
4. Where llama.cpp's loader insists on one of these in a stage that never uses it, the stage gets zeros: a few
   rows if it has neither, as many as the vocabulary if it has the other one.
5. Stages work with token ids, so the vocabulary's texts stay behind (`tokenizer.ggml.model` = "no_vocab").

`stages.cutting.families` adds what single families need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from stages.cutting.gguf_value import Value, ValueType
from stages.cutting.tensors import EMBEDDING, OUTPUT, OUTPUT_BIAS, layer_of, renumbered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stages.cutting.gguf_header import TensorInfo
    from stages.cutting.source_model import SourceModel
    from stages.layers import LayerRange

# Raise this when a stage file made by the same source and layers comes out otherwise than before.
FORMAT_VERSION: Final = 2

# Rows of an embedding that nobody looks into. llama.cpp also copies a row of logits, one float for each, per
# output row of a stage, so few are cheap twice.
FILLER_VOCAB: Final = 8

# Arrays below the architecture's name that have a fixed length, which may happen to be the number of layers.
_NOT_PER_LAYER: Final = ("rope.dimension_sections", "classifier.output_labels")

# By size per weight, smallest first; for zeros, which any of them can hold.
_FILLER_TYPES: Final = (GGMLQuantizationType.IQ1_S, GGMLQuantizationType.Q4_0, GGMLQuantizationType.F32)


@dataclass(frozen=True)
class StageTensor:
    """A tensor of a stage file.

    Attributes:
        name: In the stage file.
        shape: Elements per dimension, fastest first.
        type: Quantisation.
        n_bytes: Without padding.
        source_offset_bytes: Where its bytes lie in the source file, or None for zeros.
        source_file: Which of the model's files that is, from 0.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    n_bytes: int
    source_offset_bytes: int | None
    source_file: int = 0


@dataclass(frozen=True)
class StageLayout:
    """A stage file before it is written."""

    alignment: int
    metadata: Mapping[str, Value]
    tensors: tuple[StageTensor, ...]


def lay_out(source: SourceModel, layers: LayerRange) -> StageLayout:
    """What the stage file for some layers of a model holds.

    Args:
        source: The whole model.
        layers: Which layers, within the model.
    """
    vocabulary = _Vocabulary(source, layers)
    tensors = [*vocabulary.tensors()]
    for tensor in source.header.tensors.values():
        layer = layer_of(tensor.name)
        if layer is None and tensor.name not in (EMBEDDING, OUTPUT, OUTPUT_BIAS):
            tensors.append(_copied(tensor, tensor.name))
        elif layer is not None and layers.start <= layer < layers.stop:
            tensors.append(_copied(tensor, renumbered(tensor.name, layers.start)))
    return StageLayout(
        source.header.alignment, _stage_metadata(source, layers, vocabulary.size), tuple(tensors)
    )


def _stage_metadata(source: SourceModel, layers: LayerRange, n_vocab: int) -> dict[str, Value]:
    header, architecture = source.header, source.header.architecture
    metadata: dict[str, Value] = {}
    for key, value in header.metadata.items():
        if key.startswith(("tokenizer.", "split.")):
            continue
        per_layer = (
            key.startswith(f"{architecture}.")
            and value.count == source.n_layers
            and not key.endswith(_NOT_PER_LAYER)
            and value.type is not ValueType.STRING
        )
        metadata[key] = value.cut(layers.start, layers.stop) if per_layer else value
    metadata.update(source.family.derived(header, layers))
    metadata["tokenizer.ggml.model"] = Value.of(ValueType.STRING, "no_vocab")
    for key, number in (
        (f"{architecture}.block_count", len(layers)),
        (f"{architecture}.vocab_size", n_vocab),
        ("spanmesh.layer_start", layers.start),
        ("spanmesh.layer_stop", layers.stop),
        ("spanmesh.layer_count", source.n_layers),
    ):
        metadata[key] = Value.of(ValueType.UINT32, number)
    return metadata


class _Vocabulary:
    """The tensors with one row per token, in a stage that may need none, one or both of them."""

    def __init__(self, source: SourceModel, layers: LayerRange) -> None:
        tensors = source.header.tensors
        self._embedding = tensors[EMBEDDING]
        self._output = tensors.get(OUTPUT)
        self._bias = tensors.get(OUTPUT_BIAS)
        self._falls_back = source.family.head_falls_back_to_embedding
        self._is_first = layers.start == 0
        self._is_tail = layers.stop == source.n_layers
        self.size = self._embedding.shape[-1] if self._is_first or self._is_tail else FILLER_VOCAB

    def tensors(self) -> list[StageTensor]:
        return [*self._embedding_and_output(), *self._output_bias()]

    def _embedding_and_output(self) -> list[StageTensor]:
        embedding, output = self._embedding, self._output
        if output is None:  # tied: the tail computes its logits with the embedding
            needed = self._is_first or self._is_tail
            return [_copied(embedding, EMBEDDING) if needed else self._filler(embedding)]
        if self._is_tail and not self._is_first and self._falls_back:
            return [_copied(output, EMBEDDING)]
        kept = [_copied(embedding, EMBEDDING) if self._is_first else self._filler(embedding)]
        if self._is_tail:
            kept.append(_copied(output, OUTPUT))
        elif not self._falls_back:
            kept.append(self._filler(output))
        return kept

    def _output_bias(self) -> list[StageTensor]:
        if self._bias is None:
            return []
        if self._is_tail:
            return [_copied(self._bias, OUTPUT_BIAS)]
        return [] if self._falls_back else [self._filler(self._bias)]

    def _filler(self, tensor: TensorInfo) -> StageTensor:
        """Zeros in the shape of `tensor`, but for this stage's vocabulary, in the smallest type that fits."""
        shape = (*tensor.shape[:-1], self.size)
        kinds = _FILLER_TYPES if len(shape) > 1 and self.size > FILLER_VOCAB else (GGMLQuantizationType.F32,)
        kind = next(kind for kind in kinds if shape[0] % GGML_QUANT_SIZES[kind][0] == 0)
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        n_elements = self.size * (tensor.shape[0] if len(shape) > 1 else 1)
        return StageTensor(tensor.name, shape, kind, n_elements // block_elements * block_bytes, None)


def _copied(tensor: TensorInfo, name: str) -> StageTensor:
    return StageTensor(name, tensor.shape, tensor.type, tensor.n_bytes, tensor.offset_bytes, tensor.file)
