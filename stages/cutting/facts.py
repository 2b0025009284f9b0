"""What planning needs to know about a model, from its header alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.cutting.source_model import read_source
from stages.cutting.tensors import EMBEDDING, OUTPUT, OUTPUT_BIAS, OUTPUT_NORM

if TYPE_CHECKING:
    from pathlib import Path

    from stages.cutting.source_model import SourceModel

_F16_BYTES = 2


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
        kv_bytes_per_token: Per layer, what one position takes in an f16 KV cache.
        allowed_cuts: Layers at which a stage may start, 0 left out.
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
    kv_bytes_per_token: tuple[int, ...]
    allowed_cuts: tuple[int, ...]


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
    may_cut = source.family.refusal(header) is None
    return ModelFacts(
        path=path,
        architecture=architecture,
        name=header.text("general.name", path.stem),
        n_layers=source.n_layers,
        n_embd=header.integer(f"{architecture}.embedding_length"),
        n_vocab=embedding.shape[-1],
        n_ctx_train=header.integer(f"{architecture}.context_length"),
        file_bytes=header.file_bytes,
        layer_bytes=tuple(sum(tensor.n_bytes for tensor in layer) for layer in source.layers),
        embedding_bytes=embedding.n_bytes,
        head_bytes=sum(tensor.n_bytes for tensor in head),
        kv_bytes_per_token=_kv_bytes_per_token(source),
        allowed_cuts=tuple(range(1, source.n_layers)) if may_cut else (),
    )


def _kv_bytes_per_token(source: SourceModel) -> tuple[int, ...]:
    """A key and a value per KV head and layer, in f16. Layers without attention have 0 heads."""
    header, n_layers = source.header, source.n_layers
    prefix = f"{header.architecture}.attention."
    heads = header.per_layer(prefix + "head_count", n_layers, 0)
    n_embd_head = header.integer(f"{header.architecture}.embedding_length") // max(*heads, 1)
    key_length = header.integer(prefix + "key_length", n_embd_head)
    value_length = header.integer(prefix + "value_length", n_embd_head)
    if prefix + "head_count_kv" in header.metadata:
        heads = header.per_layer(prefix + "head_count_kv", n_layers, 0)
    return tuple(count * (key_length + value_length) * _F16_BYTES for count in heads)
