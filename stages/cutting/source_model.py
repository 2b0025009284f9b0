"""A whole model, read and checked, ready to be cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spanmesh_proto.errors import InvalidModel, UncuttableModel
from stages.cutting.families import FAMILIES, Family, family_of
from stages.cutting.gguf_reader import read_header
from stages.cutting.tensors import (
    EMBEDDING,
    OUTPUT_NORM,
    count_layers,
    require_tensors,
    require_uniform_layers,
    tensors_by_layer,
)

if TYPE_CHECKING:
    from pathlib import Path

    from stages.cutting.gguf_header import GgufHeader, TensorInfo
    from stages.layers import LayerRange


@dataclass(frozen=True)
class SourceModel:
    """A whole model.

    Attributes:
        header: Of the file.
        family: Its rules.
        layers: The tensors of each layer.
    """

    header: GgufHeader
    family: Family
    layers: tuple[tuple[TensorInfo, ...], ...]

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.layers)

    @property
    def is_known(self) -> bool:
        """Whether the families table has its rules, so that no self-check is needed."""
        return self.family.architecture in FAMILIES

    def check_range(self, layers: LayerRange) -> None:
        """Check that a stage of these layers can be made.

        Raises:
            UncuttableModel: If the model has no such layers, or cannot be cut exactly.
        """
        if layers.stop > self.n_layers:
            raise UncuttableModel(
                f"{self.header.path.name} has {self.n_layers} layers; {layers} is not among them"
            )
        reason = self.family.refusal(self.header)
        if reason is not None and len(layers) != self.n_layers:
            raise UncuttableModel(f"{self.header.path.name} cannot be cut: {reason}")


def read_source(path: Path) -> SourceModel:
    """Read a whole model's header and check that nothing of it is missing.

    Raises:
        InvalidModel: If the file is no GGUF, truncated, lacks a tensor, or is itself a stage.
        UncuttableModel: If its architecture cannot be cut at all.
    """
    header = read_header(path)
    if "spanmesh.layer_count" in header.metadata:
        start, stop = header.integer("spanmesh.layer_start"), header.integer("spanmesh.layer_stop")
        raise InvalidModel(f"{path} is a stage, layers [{start}, {stop}); name the whole model's file")
    n_layers = count_layers(header)
    family = family_of(header.architecture)
    layers = tensors_by_layer(header, n_layers)
    _require_embedding(header)
    if family.has_uniform_layers:
        require_tensors(header, (OUTPUT_NORM,))
        require_uniform_layers(header, n_layers)
    return SourceModel(header, family, layers)


def _require_embedding(header: GgufHeader) -> None:
    require_tensors(header, (EMBEDDING,))
    shape = header.tensors[EMBEDDING].shape
    n_embd = header.integer(f"{header.architecture}.embedding_length")
    if len(shape) != 2 or shape[0] != n_embd:
        raise InvalidModel(f"{header.path}: {EMBEDDING} has shape {shape}, expected ({n_embd}, vocabulary)")
