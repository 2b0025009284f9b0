"""Completion: the file of a drafter that llama.cpp loads.

An EAGLE-3 drafter may lack embedding and head, which are the target's. The head of a model is cut out of the
model's file. Such files are made once, in the cache beside stage files.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from spanmesh_proto.errors import InvalidModel
from speculative.proposer import DrafterKind
from stages.files import ModelFile, Region, atomic_write
from stages.gguf import Value, ValueType, read_header
from stages.slicing.layout import StageLayout, StageTensor
from stages.slicing.stage_writer import StageWriter, encode_header, stage_bytes
from stages.slicing.tensor_names import count_prediction_layers, is_per_layer, layer_of
from stages.weights.disk_cache import default_root
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.draft.drafter import Drafter
    from stages.gguf import GgufHeader, TensorInfo

# To be raised when the file of the same drafter changes.
_FORMAT_VERSION = 1


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
