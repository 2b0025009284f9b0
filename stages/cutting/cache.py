"""Stages that were cut or fetched before are not cut or fetched again."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from spanmesh_proto.errors import ModelError
from stages.cutting.atomic import write_atomically
from stages.cutting.cut import ByteCounter, planned_bytes, write_stage
from stages.cutting.digest import file_sha256
from stages.cutting.disk import require_disk
from stages.cutting.layout import FORMAT_VERSION
from stages.cutting.places import default_root, stage_store
from stages.cutting.self_check import cuts_of, require_exact_cut
from stages.cutting.source_model import read_source
from stages.cutting.stamp import Stamp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stages.cutting.source_model import SourceModel
    from stages.layers import LayerRange

log = structlog.get_logger()


@dataclass(frozen=True)
class StageFile:
    """A stage in the cache.

    Attributes:
        path: The stage file.
        sha256: Of its content, hex.
        size_bytes: Of the file.
        layers: Which layers it holds.
        n_layers: Layers of the whole model.
    """

    path: Path
    sha256: str
    size_bytes: int
    layers: LayerRange
    n_layers: int


class StageCache:
    """Stage files by content, and an index of what was cut from what.

    ::

        stages/<sha256>.gguf   the files; <sha256>.json their stamps; <sha256>.partial on their way in
        sources/<key>.json     stamps of whole models, so that each is hashed once
        cuts/<key>             sha256 of the stage that was cut from that source, layers, format version
        checked/<key>          sources and cuts of families not in the table that passed the self-check

    Args:
        root: The cache's folder, `default_root` unless given.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root if root is not None else default_root()
        self._store = stage_store(self._root)

    def find(self, sha256: str) -> Path | None:
        """The stage file with this content, or None. A file that was changed or cut short is removed."""
        return self._store.find(sha256)

    def partial(self, sha256: str) -> Path:
        """Where to gather a stage file from elsewhere; what lies there may be continued."""
        return self._store.partial(sha256)

    def adopt(self, partial: Path, sha256: str) -> Path:
        """Take a gathered stage file in after checking its content.

        Raises:
            ModelError: If the content is another; the file is removed.
        """
        return self._store.adopt(partial, sha256)

    def cut(
        self, source: Path, layers: LayerRange, *, progress: Callable[[int, int], None] | None = None
    ) -> StageFile:
        """The stage file for some layers of a model, cut now unless it was before.

        Args:
            source: The whole model, a GGUF file.
            layers: Which of its layers.
            progress: Called with bytes done and bytes in all.

        Raises:
            InvalidModel: If the source is no GGUF, truncated, or lacks a tensor.
            UncuttableModel: If it has no such layers, or cannot be cut exactly there.
            ModelError: If the cache cannot be written, or its disk has no room.
        """
        model = read_source(source)
        model.check_range(layers)
        stage_size = planned_bytes(model, layers)
        source_sha256 = self._stamped_sha256(source)
        counter = ByteCounter(stage_size + (0 if source_sha256 else model.header.file_bytes), progress)
        source_sha256 = source_sha256 or self._hash_source(source, counter)
        entry = self._root / "cuts" / f"{source_sha256}-{layers.start}-{layers.stop}-v{FORMAT_VERSION}"
        path = self._find_cut(entry)
        if path is None:
            self._check_once(model, layers, source_sha256)
            require_disk(self._store.fresh(), stage_size)
            path = self._cut(model, layers, source_sha256, counter)
            write_atomically(entry, path.stem)
        else:
            counter.add(stage_size)
        return StageFile(path, path.stem, stage_size, layers, model.n_layers)

    def _cut(self, model: SourceModel, layers: LayerRange, source_sha256: str, counter: ByteCounter) -> Path:
        fresh = self._store.fresh()
        try:
            sha256 = write_stage(model, layers, fresh, source_sha256, counter.add)
            path = self._store.adopt_trusted(fresh, sha256)
        finally:
            fresh.unlink(missing_ok=True)
        log.info("stage_cut", model=model.header.path.name, layers=str(layers), sha256=sha256)
        return path

    def _find_cut(self, entry: Path) -> Path | None:
        try:
            return self._store.find(entry.read_text())
        except (OSError, ModelError):
            return None

    def _check_once(self, model: SourceModel, layers: LayerRange, source_sha256: str) -> None:
        if model.is_known:
            return
        names = (f"{source_sha256}-{cut}-v{FORMAT_VERSION}" for cut in cuts_of(layers, model.n_layers))
        passed = [self._root / "checked" / name for name in names]
        if not all(path.exists() for path in passed):
            require_exact_cut(model, layers)
            for path in passed:
                write_atomically(path, f"{layers}")

    def _stamp_path(self, source: Path) -> Path:
        key = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()
        return self._root / "sources" / f"{key}.json"

    def _stamped_sha256(self, source: Path) -> str | None:
        stamp = Stamp.load(self._stamp_path(source))
        return stamp.sha256 if stamp is not None and stamp.fits(source) else None

    def _hash_source(self, source: Path, counter: ByteCounter) -> str:
        # The stamp is of the file as it was before: one that changes meanwhile is hashed again next time.
        before = source.stat()
        sha256 = file_sha256(source, counter.add)
        Stamp(sha256, before.st_size, before.st_mtime_ns).save(self._stamp_path(source))
        return sha256
