"""Drafter: what a draft file is, whether it fits the model, and the file that llama.cpp loads.

A draft file is a small model with the target's vocabulary, an EAGLE-3 drafter (Li et al. 2025), a head for
multi-token prediction (DeepSeek-V3 2024), a drafter of blocks (`mesh.draft.block_file`), or an assistant of
Gemma 4 (`mesh.draft.assistant_file`). All but the first read hidden states of the target, which may bring a
head of its own.

A drafter of these may lack embedding and head, which are the target's. The head of a model is cut out of the
model's file. Such files are made once, in the cache beside stage files.
"""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from mesh.draft import assistant_file, block_file
from mesh.draft.tensor_checks import check_d2t, check_heads, check_shapes, end_shapes
from spanmesh_proto.errors import InvalidModel, UncuttableModel
from speculative.proposer import DrafterKind
from stages.files import ModelFile, Region, atomic_write
from stages.gguf import Value, ValueType, read_header
from stages.slicing.layout import StageLayout, StageTensor
from stages.slicing.stage_writer import StageWriter, encode_header, stage_bytes
from stages.slicing.tensor_names import (
    EMBEDDING,
    OUTPUT,
    OUTPUT_NORM,
    count_prediction_layers,
    is_per_layer,
    layer_of,
)
from stages.weights.disk_cache import default_root
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from stages.gguf import GgufHeader, TensorInfo
    from stages.slicing.model_facts import ModelFacts

_EAGLE3: Final = "eagle3"
# Drafters that llama.cpp does not read as they are.
_NOT_YET: Final = {
    "gemma4_assistant": "llama.cpp calls its architecture gemma4-assistant",
}
# Architectures whose prediction layers this llama.cpp computes, by its models/*.cpp.
_HAS_MTP_GRAPH: Final = frozenset(
    {
        "bailingmoe3",
        "cohere2moe",
        "deepseek2",
        "deepseek32",
        "glm-dsa",
        "glm4moe",
        "hy_v3",
        "mimo2",
        "nemotron_h_moe",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "step35",
    }
)
_NUM_EAGLE3_LAYERS: Final = 3
_FEATURE_NORM: Final = "enc.output_norm.weight"
# To be raised when the file of the same drafter changes.
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Drafter:
    """A drafter that fits its target."""

    kind: DrafterKind
    """Its kind."""
    header: GgufHeader
    """Header of its file, or of the target's if that brings it."""
    layers: tuple[int, ...] = ()
    """Layers of the target whose outputs it reads, in its order; the number of the target's layers stands for
    the head state. Empty for a small model."""
    n_embd: int = 0
    """Values of a row of one layer; 0 for a small model."""
    lacks: tuple[str, ...] = ()
    """Tensors that it takes from the target."""
    most_drafted: int = field(default=1, kw_only=True)
    """Most tokens that it drafts in one pass."""

    @property
    def path(self) -> Path:
        """Its file."""
        return self.header.path

    @property
    def reads_features(self) -> bool:
        """Whether it reads hidden states of the target."""
        return bool(self.layers)

    @property
    def is_beside_tail(self) -> bool:
        """Whether it computes beside the target's last stage, and not on the coordinator's host."""
        return self.kind is DrafterKind.ASSISTANT

    @property
    def feature_width(self) -> int:
        """Values of a row of features; 0 for a small model."""
        return len(self.layers) * self.n_embd

    @property
    def num_drafting_layers(self) -> int:
        """Layers that draft: of a head for multi-token prediction the first one only."""
        if self.kind in {DrafterKind.EAGLE3, DrafterKind.MTP}:
            return 1
        return self.header.integer(f"{self.header.architecture}.block_count")


def read_drafter(path: Path, target: ModelFacts) -> Drafter:
    """The drafter in a file.

    Args:
        path: The GGUF, or its first file if it is split.
        target: The served model.

    Raises:
        InvalidModel: If it is no GGUF, or a drafter of another model.
        UncuttableModel: If drafters of its kind cannot be run for this model.
    """
    header = read_header(path)
    architecture = header.architecture
    if architecture == assistant_file.ARCHITECTURE:
        assistant_file.check_assistant(header, target)
        return Drafter(DrafterKind.ASSISTANT, header)
    if (reason := _NOT_YET.get(architecture)) is not None:
        raise UncuttableModel(
            f"{path.name} is a drafter of kind {architecture}, which cannot be run yet: {reason}; use an "
            "EAGLE-3 or DFlash drafter, a head for multi-token prediction or a small model"
        )
    if architecture == _EAGLE3:
        return _eagle3(header, target)
    if architecture == block_file.ARCHITECTURE:
        _require_fit(header, target)
        found = block_file.check_block_file(header, target)
        return Drafter(
            found.kind, header, found.layers, target.n_embd, found.lacks, most_drafted=found.most_drafted
        )
    if count_prediction_layers(header) and not any(layer_of(name) == 0 for name in header.tensors):
        return _head_file(header, target)
    if target.n_prediction_layers and path.samefile(target.path):
        raise InvalidModel(
            f"{path.name} is the served model itself: leave out --draft, its own head drafts without it"
        )
    return Drafter(DrafterKind.MODEL, header)


def serving_command(model: Path | str, drafter: Path | str) -> str:
    """The command that serves a model with a drafter, for a shell."""
    return f"mesh serve {shlex.quote(str(model))} --draft {shlex.quote(str(drafter))}"


def own_head(target: ModelFacts) -> Drafter | None:
    """The target's own head for multi-token prediction, if it has one that can be run."""
    if not target.n_prediction_layers or target.architecture not in _HAS_MTP_GRAPH or _unfit(target):
        return None
    header = read_header(target.path)
    if f"blk.{target.n_layers}.nextn.eh_proj.weight" not in header.tensors:
        return None  # a file whose prediction layers were removed
    return Drafter(DrafterKind.MTP, header, (target.n_layers,), target.n_embd)


def _unfit(target: ModelFacts) -> str | None:
    """Reason why no drafter can read hidden states of a model; None if one can.

    Models with recurrent layers go back to checkpoints after a rejection; without any they do not speculate.
    """
    if target.n_streams > 1:
        return f"its hidden states have {target.n_streams} streams"
    return None


def _require_fit(header: GgufHeader, target: ModelFacts) -> None:
    if (reason := _unfit(target)) is not None:
        raise UncuttableModel(
            f"{header.path.name} cannot draft for {target.name}: {reason}; leave out --draft"
        )


def _eagle3(header: GgufHeader, target: ModelFacts) -> Drafter:
    name = header.path.name
    _require_fit(header, target)
    width = header.integer("eagle3.target_hidden_size")
    if width != target.n_embd:
        raise InvalidModel(
            f"{name} reads hidden states of {width} values, {target.name} has {target.n_embd}: it was made "
            "for another model"
        )
    if (n_layers := header.integer("eagle3.block_count")) != 1:
        raise InvalidModel(f"{name} has {n_layers} layers; llama.cpp runs EAGLE-3 drafters of one")
    # llama.cpp counts the layers that read the hidden states, so the layer before gives them.
    layers = tuple(layer - 1 for layer in header.integers("eagle3.target_layers") or ())
    if len(layers) != _NUM_EAGLE3_LAYERS or not all(0 <= layer < target.n_layers - 1 for layer in layers):
        are_three = len(layers) == _NUM_EAGLE3_LAYERS
        shown = ", ".join(str(layer + 1) for layer in layers) if are_three else "no list of three"
        raise InvalidModel(
            f"{name} reads hidden states before layers {shown}, of which {target.name} has 1 to "
            f"{target.n_layers - 1}: it was made for another model"
        )
    return Drafter(DrafterKind.EAGLE3, header, layers, target.n_embd, _check_eagle3(header, target))


def _check_eagle3(header: GgufHeader, target: ModelFacts) -> tuple[str, ...]:
    """Check the tensors; returns those that the target has to give."""
    n_embd = header.integer("eagle3.embedding_length")
    heads, heads_kv, head = check_heads(header, n_embd)
    n_ff = header.integer("eagle3.feed_forward_length")
    joined = _NUM_EAGLE3_LAYERS * target.n_embd
    shapes = {
        "fc.weight": (joined, n_embd),
        OUTPUT_NORM: (n_embd,),
        "blk.0.attn_norm.weight": (n_embd,),
        "blk.0.attn_norm_2.weight": (n_embd,),
        "blk.0.attn_q.weight": (2 * n_embd, head * heads),
        "blk.0.attn_k.weight": (2 * n_embd, head * heads_kv),
        "blk.0.attn_v.weight": (2 * n_embd, head * heads_kv),
        "blk.0.attn_output.weight": (head * heads, n_embd),
        "blk.0.ffn_norm.weight": (n_embd,),
        "blk.0.ffn_gate.weight": (n_embd, n_ff),
        "blk.0.ffn_up.weight": (n_embd, n_ff),
        "blk.0.ffn_down.weight": (n_ff, n_embd),
    }
    if _FEATURE_NORM in header.tensors:
        shapes[_FEATURE_NORM] = (joined,)
    rows = check_d2t(header, target)
    check_shapes(header, shapes | end_shapes(header, target, n_embd, rows))
    lacks = tuple(name for name in (EMBEDDING, OUTPUT) if name not in header.tensors)
    if lacks and n_embd != target.n_embd:
        raise InvalidModel(
            f"{header.path.name} lacks {lacks[0]}, and that of {target.name} has another width: "
            f"{target.n_embd}, not {n_embd}"
        )
    if OUTPUT in lacks and rows != target.n_vocab:
        raise InvalidModel(f"{header.path.name} has {rows} tokens of its own but no {OUTPUT} for them")
    return lacks


def _head_file(header: GgufHeader, target: ModelFacts) -> Drafter:
    name, architecture = header.path.name, header.architecture
    if architecture != target.architecture:
        raise InvalidModel(
            f"{name} is a head for models of architecture {architecture}, {target.name} is "
            f"{target.architecture}"
        )
    _require_fit(header, target)
    if architecture not in _HAS_MTP_GRAPH:
        raise UncuttableModel(
            f"{name} cannot draft: llama.cpp computes no multi-token prediction for {architecture}; leave "
            "out --draft"
        )
    n_trunk = header.integer(f"{architecture}.block_count") - count_prediction_layers(header)
    if n_trunk != target.n_layers:
        raise InvalidModel(f"{name} is a head for {n_trunk} layers, {target.name} has {target.n_layers}")
    n_embd = header.integer(f"{architecture}.embedding_length")
    if n_embd != target.n_embd:
        raise InvalidModel(f"{name} reads rows of {n_embd} values, {target.name} has {target.n_embd}")
    _require(header, (EMBEDDING, OUTPUT_NORM, f"blk.{n_trunk}.nextn.eh_proj.weight"))
    return Drafter(DrafterKind.MTP, header, (target.n_layers,), target.n_embd)


def _require(header: GgufHeader, names: Iterable[str]) -> None:
    for name in names:
        if name not in header.tensors:
            raise InvalidModel(f"{header.path.name}: tensor {name} is missing; convert the head again")


def with_drafter(target: ModelFacts, drafter: Drafter | None, num_sessions: int) -> ModelFacts:
    """Facts of a model that is served with a drafter, or with none, for its placement.

    Args:
        target: The model.
        drafter: Its drafter.
        num_sessions: Concurrent sessions.
    """
    if drafter is None or not drafter.is_beside_tail:
        return target
    return assistant_file.beside_tail(target, drafter.header, num_sessions)


def loadable_bytes(drafter: Drafter, target: Path) -> int:
    """Size of the file that `loadable_file` gives."""
    layout, _ = _layout(drafter, target)
    return drafter.header.file_bytes if layout is None else stage_bytes(layout)


def loadable_file(drafter: Drafter, target: Path, root: Path | None = None) -> Path:
    """The file that llama.cpp loads: the drafter's own if it is complete, or one in the cache.

    Args:
        drafter: The drafter.
        target: The served model.
        root: Folder of the cache, the user's unless given.

    Raises:
        ModelError: If it cannot be written.
        InvalidModel: If a file ends early, or cannot be read.
    """
    layout, paths = _layout(drafter, target)
    if layout is None:
        return drafter.path
    key = hashlib.sha256(encode_header(layout))
    key.update(f"{_FORMAT_VERSION} {stamps_of(paths)}".encode())
    folder = (root if root is not None else default_root()) / "drafters"
    path = folder / f"{key.hexdigest()[:32]}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with ModelFile(*paths) as reader, atomic_write(path) as file:
        StageWriter(reader, file, lambda _num_bytes: None).write(layout)
    return path


def _layout(drafter: Drafter, target: Path) -> tuple[StageLayout | None, tuple[Path, ...]]:
    """Content of the file to be made, and the files that it is made of; None if the drafter is complete."""
    header = drafter.header
    if drafter.lacks:
        return _completed(header, read_header(target), drafter.lacks)
    is_own = header.path.samefile(target)
    if drafter.kind is DrafterKind.MTP and (is_own or _num_heads(header) > 1):
        return _head_of(header), header.paths
    return None, header.paths


def _num_heads(header: GgufHeader) -> int:
    return count_prediction_layers(header)


def _completed(
    header: GgufHeader, target: GgufHeader, lacks: tuple[str, ...]
) -> tuple[StageLayout, tuple[Path, ...]]:
    tensors = [_copied(tensor) for tensor in header.tensors.values()]
    for name in lacks:
        # A head may be the embedding, too.
        given = target.tensors.get(name) or target.tensors.get("token_embd.weight")
        if given is None:
            raise InvalidModel(f"{header.path.name} lacks {name}, and so does {target.path.name}")
        own = _copied(given, file=given.file + len(header.paths))
        tensors.append(replace(own, name=name))
    return StageLayout(header.alignment, header.metadata, tuple(tensors)), (*header.paths, *target.paths)


def _head_of(header: GgufHeader) -> StageLayout:
    """Layout of the first head's file: metadata as they are, without the layers that it does not use."""
    architecture = header.architecture
    n_layers = header.integer(f"{architecture}.block_count")
    trunk = n_layers - _num_heads(header)
    metadata = {
        key: value.cut(0, trunk + 1) if is_per_layer(key, value, architecture, n_layers) else value
        for key, value in header.metadata.items()
        if not key.startswith("split.")
    }
    metadata[f"{architecture}.block_count"] = Value.of(ValueType.UINT32, trunk + 1)
    metadata[f"{architecture}.nextn_predict_layers"] = Value.of(ValueType.UINT32, 1)
    kept = [tensor for name, tensor in header.tensors.items() if layer_of(name) in {None, trunk}]
    return StageLayout(header.alignment, metadata, tuple(_copied(tensor) for tensor in kept))


def _copied(tensor: TensorInfo, file: int | None = None) -> StageTensor:
    region = Region(tensor.file if file is None else file, tensor.offset_bytes, tensor.n_bytes)
    return StageTensor(tensor.name, tensor.shape, tensor.type, tensor.n_bytes, region)
