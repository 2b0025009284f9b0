"""Opening of a stage's disk, once it is known what its rows depend on."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from spanmesh_proto.errors import MeshError
from stages.cancellable_work import in_own_thread
from stages.gguf.reader import part_paths
from stages.serving.block_store import BlockStore
from stages.serving.rows_identity import content_sha256, rows_identity
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from stages.serving.kv_disk import KvDisk
    from stages.serving.rows_identity import RowsSetting
    from stages.weights.hashing import FileStamp

log = structlog.get_logger()


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


async def open_disk(
    disk: KvDisk, root: Path, setting: RowsSetting, origin: RowsOrigin, most_bytes: int, *, stage_index: int
) -> None:
    """Keep blocks on disk once it is known what rows depend on: the first time a model is read for that.

    Args:
        disk: The stage's disk.
        root: Folder of the host's cache.
        setting: Settings on which its rows depend.
        origin: Its file.
        most_bytes: Limit of the blocks.
        stage_index: Its place in the pipeline, for messages.
    """
    try:
        sha256, whole = origin.sha256, origin.whole
        if whole is not None:
            paths = part_paths(Path(whole))
            index = root / "sources" / f"{hashlib.sha256(os.fsencode(whole)).hexdigest()}-files.json"
            sha256 = await in_own_thread(content_sha256, paths, index)
            if stamps_of(paths) != origin.stamps:
                reason = f"{whole} was changed since it was loaded: load the model again"
                log.warning("disk_not_opened", stage=stage_index, reason=reason)
                return
        identity = await in_own_thread(rows_identity, setting, sha256)
        await disk.open(BlockStore(root / "kv", identity, most_bytes))
    except (MeshError, OSError) as error:
        # Without it prompts are computed.
        log.warning("disk_not_opened", stage=stage_index, reason=str(error))
