"""Source model: a whole model, checked, with its tensors by layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from spanmesh_proto.errors import InvalidModel, UncuttableModel
from stages.gguf import read_header
from stages.layers import LayerRange
from stages.slicing.architectures.cutting_rules import FAMILIES, family_of
from stages.slicing.architectures.rule_types import NO_BLANKS
from stages.slicing.drafter_files import drafter_label
from stages.slicing.tensor_names import EMBEDDING, OUTPUT_NORM, count_prediction_layers, layer_of, trunk_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stages.gguf import GgufHeader, TensorInfo
    from stages.slicing.architectures.rule_types import Blanks, Family, Rule


@dataclass(frozen=True)
class SourceModel:
    """A whole model, checked."""

    header: GgufHeader
    """Header of its trunk: the file's, without prediction layers."""
    family: Family
    """Rules of its family."""
    layers: tuple[tuple[TensorInfo, ...], ...]
    """The tensors of each layer of the trunk."""
    n_prediction_layers: int = 0
    """Layers for multi-token prediction that follow the trunk in the file."""

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.layers)

    @property
    def is_known(self) -> bool:
        """Whether the registry has its certified rules, so that no self-check is needed."""
        return self.family.architecture in FAMILIES

    @property
    def rules_used(self) -> tuple[Rule, ...]:
        """The rules that affect this model; those of entry and exit of its graph come last."""
        return tuple(rule for rule in self.family.rules if self._matters(rule)) + self.family.entry.rules(
            self.header
        )

    def _matters(self, rule: Rule) -> bool:
        if rule.refused(self.header) or rule.refused_lengths(self.header):
            return True
        ranges = [LayerRange(cut, self.n_layers) for cut in self.allowed_cuts]
        return any(
            rule.derived(self.header, layers)
            or rule.left_out(self.header, layers)
            or rule.blanks(self.header, layers) != NO_BLANKS
            for layers in ranges
        )

    @cached_property
    def refused_cuts(self) -> Mapping[int, str]:
        """Places where it cannot be cut exactly, with the reasons."""
        return self.family.refused(self.header)

    @cached_property
    def refused_lengths(self) -> Mapping[int, str]:
        """Numbers of layers that a stage must not have, with the reasons."""
        return self.family.refused_lengths(self.header)

    @property
    def allowed_cuts(self) -> tuple[int, ...]:
        """Layers at which a stage may start, 0 left out."""
        return tuple(cut for cut in range(1, self.n_layers) if cut not in self.refused_cuts)

    @property
    def lone_cuts(self) -> tuple[int, ...]:
        """Cuts at which it can be cut in two, without any other."""
        return tuple(
            cut
            for cut in self.allowed_cuts
            if not self._refused_length(LayerRange(0, cut))
            and not self._refused_length(LayerRange(cut, self.n_layers))
        )

    def _refused_length(self, layers: LayerRange) -> int:
        """The number of layers of a stage's file, if it is not allowed, else 0."""
        blanks = self.blanks(layers)
        length = len(layers) + blanks.before + blanks.after
        return length if length in self.refused_lengths and len(layers) < self.n_layers else 0

    def blanks(self, layers: LayerRange) -> Blanks:
        """Blank layers of a stage's file."""
        return NO_BLANKS if len(layers) == self.n_layers else self.family.blanks(self.header, layers)

    def check_range(self, layers: LayerRange) -> None:
        """Check that a stage of these layers can be made.

        Raises:
            UncuttableModel: If the model has no such layers, or cannot be cut exactly there.
        """
        name = self.header.path.name
        if layers.stop > self.n_layers:
            raise UncuttableModel(f"{name} has {self.n_layers} layers; {layers} is not among them")
        if len(layers) == self.n_layers:
            return
        if not self.allowed_cuts:
            raise UncuttableModel(f"{name} cannot be cut: {self.refused_cuts.get(1, 'it has one layer')}")
        for cut in (layers.start, layers.stop):
            if cut in self.refused_cuts:
                raise UncuttableModel(f"{name} cannot be cut at layer {cut}: {self.refused_cuts[cut]}")
        length = self._refused_length(layers)
        if length:
            raise UncuttableModel(
                f"{name} cannot have a stage of {length} layers: {self.refused_lengths[length]}; choose "
                "another number"
            )


def count_layers(header: GgufHeader) -> int:
    """Number of layers, from the metadata.

    Raises:
        InvalidModel: If the metadata have no number of layers, or one that the tensors rule out.
    """
    architecture = header.architecture
    n_layers = header.integer(f"{architecture}.block_count")
    if n_layers < 1:
        raise InvalidModel(f"{header.path}: {architecture}.block_count is {n_layers}, need at least 1")
    if n_layers > len(header.tensors):
        raise InvalidModel(
            f"{header.path}: {n_layers} layers, but {len(header.tensors)} tensors; fetch it again"
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


def read_source(path: Path) -> SourceModel:
    """Read and check a whole model's header.

    Raises:
        InvalidModel: If the file is no GGUF, truncated, lacks a tensor, or is itself a stage.
        UncuttableModel: If its architecture cannot be cut at all, or it is a drafter.
    """
    header = read_header(path)
    if "spanmesh.layer_count" in header.metadata:
        start, stop = header.integer("spanmesh.layer_start"), header.integer("spanmesh.layer_stop")
        raise InvalidModel(f"{path} is a stage, layers [{start}, {stop}); name the whole model's file")
    _require_decoder(header)
    n_prediction_layers = count_prediction_layers(header)
    header = trunk_of(header)
    n_layers = count_layers(header)
    family = family_of(header.architecture)
    layers = tensors_by_layer(header, n_layers)
    _require_embedding(header)
    if family.has_uniform_layers:
        require_tensors(header, (OUTPUT_NORM,))
        require_uniform_layers(header, n_layers)
    return SourceModel(header, family, layers, n_prediction_layers)


def _require_decoder(header: GgufHeader) -> None:
    """Check that the model generates text token by token.

    Raises:
        UncuttableModel: Naming its actual kind.
    """
    if label := drafter_label(header):
        name = header.path.name
        raise UncuttableModel(
            f"{name} is {label} and drafts for another model: `mesh draft check {name}` looks for that model "
            "beside it, and names the command that serves both"
        )
    reason = family_of(header.architecture).not_served
    causal = header.metadata.get(f"{header.architecture}.attention.causal")
    if any(name.startswith(("enc.", "dec.")) for name in header.tensors):
        reason = "an encoder-decoder model reads all of its input before it answers"
    elif reason is None and causal is not None and causal.decode() is False:
        reason = (
            "its attention is not causal, as in models for diffusion or for embeddings, which `mesh load "
            "--embeddings` serves"
        )
    if reason is not None:
        raise UncuttableModel(f"{header.path.name} ({header.architecture}) cannot be served: {reason}")


def _require_embedding(header: GgufHeader) -> None:
    require_tensors(header, (EMBEDDING,))
    shape = header.tensors[EMBEDDING].shape
    n_embd = header.integer(f"{header.architecture}.embedding_length")
    if len(shape) != 2 or shape[0] != n_embd:
        raise InvalidModel(f"{header.path}: {EMBEDDING} has shape {shape}, expected ({n_embd}, vocabulary)")
