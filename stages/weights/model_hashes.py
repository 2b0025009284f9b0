"""Hashes of a model's tensors, each found out once, and kept as long as the model's files do not change."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from dataclasses import astuple
from typing import TYPE_CHECKING

from spanmesh_proto.errors import InvalidModel
from stages.gguf.file_io import ModelFile, Region, unreadable, write_atomically
from stages.weights.file_stamp import FileStamp, stamps_of
from stages.weights.piece_hash import in_threads, region_sha256
from stages.weights.recipe import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path


class ModelHashes:
    """Of one model.

    Args:
        paths: Its files.
        index: Where to keep what was found out.
    """

    def __init__(self, paths: Sequence[Path], index: Path) -> None:
        self._paths = tuple(paths)
        self._index = index
        self._stamps = stamps_of(paths)
        self._known = self._load()
        self._lock = threading.Lock()

    @property
    def is_current(self) -> bool:
        """Whether the model's files are as they were."""
        return stamps_of(self._paths) == self._stamps

    def missing_bytes(self, regions: Collection[Region]) -> int:
        """How much is to be read to know the hashes of these."""
        return sum(region.num_bytes for region in set(regions) if region not in self._known)

    def of(
        self, regions: Collection[Region], on_bytes: Callable[[int], None]
    ) -> dict[Region, tuple[str, ...]]:
        """The hashes of each `PIECE_BYTES` of some regions, read now unless they were before.

        Args:
            regions: Which.
            on_bytes: Called with the number of bytes just hashed.

        Raises:
            InvalidModel: If the model cannot be read, or changes meanwhile.
        """
        with self._lock:
            missing = sorted({region for region in regions if region not in self._known})
            if missing:
                try:
                    self._find_out(missing, on_bytes)
                finally:
                    self._save()
            return {region: self._known[region] for region in regions}

    def _find_out(self, missing: Sequence[Region], on_bytes: Callable[[int], None]) -> None:
        pieces = [(region, start) for region in missing for start in range(0, region.num_bytes, PIECE_BYTES)]
        found: dict[Region, list[str]] = {region: [] for region in missing}
        with ModelFile(*self._paths) as model:

            def read(piece: tuple[Region, int]) -> str:
                region, start = piece
                path, length = self._paths[region.file], min(PIECE_BYTES, region.num_bytes - start)
                try:
                    sha256 = region_sha256(model.descriptor(region.file), region, start, length)
                except OSError as error:
                    raise unreadable(path, error) from error
                if sha256 is None:
                    raise InvalidModel(f"{path} ended while it was being read; fetch it again")
                return sha256

            with closing(in_threads(read, pieces)) as hashes:
                for (region, start), sha256 in hashes:
                    found[region].append(sha256)
                    if start + PIECE_BYTES >= region.num_bytes:
                        self._known[region] = tuple(found[region])
                    on_bytes(min(PIECE_BYTES, region.num_bytes - start))
        if not self.is_current:
            self._known.clear()
            raise InvalidModel(f"{self._paths[0]} was changed while it was being read; try again")
        self._known.update({region: () for region in missing if not region.num_bytes})

    def _load(self) -> dict[Region, tuple[str, ...]]:
        try:
            saved = json.loads(self._index.read_text())
            stamps = tuple(FileStamp(*map(int, stamp)) for stamp in saved["stamps"])
            if stamps != self._stamps or saved["piece_bytes"] != PIECE_BYTES:
                return {}
            return {Region(*map(int, region)): tuple(map(str, hashes)) for region, hashes in saved["regions"]}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _save(self) -> None:
        regions = [[list(region), list(hashes)] for region, hashes in sorted(self._known.items())]
        saved = {"stamps": [astuple(stamp) for stamp in self._stamps], "piece_bytes": PIECE_BYTES}
        write_atomically(self._index, json.dumps({**saved, "regions": regions}, separators=(",", ":")))
