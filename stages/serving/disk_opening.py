"""Opening of a stage's block files, once it is known what its rows depend on."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spanmesh_proto.errors import InvalidModel
from stages.cancellable_work import in_own_thread
from stages.gguf.header import part_paths
from stages.serving.block_store import BlockStore
from stages.serving.rows_identity import content_sha256, rows_identity
from stages.weights.disk_cache import read_storage_options
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from stages.serving.rows_identity import RowsSetting
    from stages.weights.hashing import FileStamp


@dataclass(frozen=True)
class RowsOrigin:
    """File of which a stage computes its rows."""

    sha256: str
    """Hash of the recipe of the stage file; of no use for the model as it is."""
    whole: str | None
    """Absolute path of the model's first file, if the stage is the model as it is."""
    stamps: tuple[FileStamp, ...]
    """Stamps of all of the model's files, as they were when this was made."""

    @classmethod
    def of(cls, sha256: str, whole: str | None) -> RowsOrigin:
        """The origin of a file that is about to be loaded."""
        return cls(sha256, whole, () if whole is None else stamps_of(part_paths(Path(whole))))


def store_opener(
    root: Path, setting: RowsSetting, origin: RowsOrigin, most_bytes: int
) -> Callable[[], Awaitable[BlockStore]] | None:
    """A function that finds the block files of a stage: the first time it reads the whole model for that.

    Args:
        root: Folder of the host's cache.
        setting: Settings on which the stage's rows depend.
        origin: Its file.
        most_bytes: Limit of all blocks, unless the host has one of its own.

    Returns:
        The function, which raises a `MeshError` or an OSError; None if the host keeps no blocks.
    """
    own_bytes = read_storage_options().kv_disk_bytes
    most_bytes = most_bytes if own_bytes is None else own_bytes

    async def open_store() -> BlockStore:
        sha256 = await _content_sha256(root, origin)
        identity = await in_own_thread(rows_identity, setting, sha256)
        return BlockStore(root / "kv", identity, most_bytes)

    return open_store if most_bytes else None


async def _content_sha256(root: Path, origin: RowsOrigin) -> str:
    """Hash of what a stage has loaded: of its recipe, or of the model as it is."""
    if origin.whole is None:
        return origin.sha256
    paths = part_paths(Path(origin.whole))
    index = root / "sources" / f"{hashlib.sha256(os.fsencode(origin.whole)).hexdigest()}-files.json"
    sha256 = await in_own_thread(content_sha256, paths, index)
    if stamps_of(paths) != origin.stamps:
        raise InvalidModel(f"{origin.whole} was changed since it was loaded: load the model again")
    return sha256
