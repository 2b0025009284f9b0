"""Which tensor belongs where: a layer, the embedding, the head, or every stage."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import InvalidModel, UncuttableModel

if TYPE_CHECKING:
    from stages.gguf.header import GgufHeader, TensorInfo

EMBEDDING: Final = "token_embd.weight"
OUTPUT_NORM: Final = "output_norm.weight"
OUTPUT: Final = "output.weight"
OUTPUT_BIAS: Final = "output.bias"

_BLOCK: Final = re.compile(r"blk\.([0-9]{1,9})\.(.+)")


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to: `blk.7.attn_q.weight` gives 7, `rope_freqs.weight` None."""
    match = _BLOCK.fullmatch(name)
    return int(match[1]) if match else None


def renumbered(name: str, shift: int) -> str:
    """The layer's tensor as it is called when the layer moves down by `shift`."""
    match = _BLOCK.fullmatch(name)
    return f"blk.{int(match[1]) - shift}.{match[2]}" if match else name


def count_layers(header: GgufHeader) -> int:
    """Layers of the model, from its metadata.

    Raises:
        InvalidModel: If the metadata name no layers.
        UncuttableModel: If some of its layers are no plain decoder layers.
    """
    architecture = header.architecture
    n_layers = header.integer(f"{architecture}.block_count")
    if n_layers < 1:
        raise InvalidModel(f"{header.path}: {architecture}.block_count is {n_layers}, need at least 1")
    if n_layers > len(header.tensors):
        raise InvalidModel(
            f"{header.path}: {n_layers} layers, but {len(header.tensors)} tensors; fetch it again"
        )
    if n_extra := header.integer(f"{architecture}.nextn_predict_layers", 0):
        raise UncuttableModel(
            f"{header.path.name} ends in {n_extra} layers for multi-token prediction: not supported yet; "
            "convert the model without them"
        )
    return n_layers


def tensors_by_layer(header: GgufHeader, n_layers: int) -> tuple[tuple[TensorInfo, ...], ...]:
    """The tensors of each layer, in file order.

    Raises:
        InvalidModel: If a layer has no tensors, or the file has layers that the metadata do not count.
    """
    layers: list[list[TensorInfo]] = [[] for _ in range(n_layers)]
    for tensor in header.tensors.values():
        layer = layer_of(tensor.name)
        if layer is None:
            continue
        if layer >= n_layers:
            raise InvalidModel(
                f"{header.path}: tensor {tensor.name!r} is of layer {layer}, the metadata count {n_layers}"
            )
        layers[layer].append(tensor)
    for number, tensors in enumerate(layers):
        if not tensors:
            raise InvalidModel(
                f"{header.path}: layer {number} of {n_layers} has no tensors; fetch the file again"
            )
    return tuple(tuple(tensors) for tensors in layers)


def require_tensors(header: GgufHeader, names: tuple[str, ...]) -> None:
    """Check that tensors outside the layers exist.

    Raises:
        InvalidModel: Naming the first that is missing.
    """
    for name in names:
        if name not in header.tensors:
            raise InvalidModel(f"{header.path}: tensor {name!r} is missing; convert or fetch the file again")


def require_uniform_layers(header: GgufHeader, n_layers: int) -> None:
    """Check that every layer has the tensors that most layers have.

    Raises:
        InvalidModel: Naming the first that is missing.
    """
    layers = [
        {tensor.name.removeprefix(f"blk.{number}.") for tensor in tensors}
        for number, tensors in enumerate(tensors_by_layer(header, n_layers))
    ]
    for kind in sorted(set[str]().union(*layers)):
        holders = [kind in layer for layer in layers]
        if 2 * sum(holders) > n_layers and not all(holders):
            layer = holders.index(False)
            raise InvalidModel(
                f"{header.path}: tensor 'blk.{layer}.{kind}' is missing, other layers have theirs; "
                "convert or fetch the file again"
            )
