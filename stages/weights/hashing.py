"""SHA-256 of the pieces of a model, cached by file stamp."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import astuple, dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, TypeVar

from spanmesh_proto.errors import InvalidModel
from stages.files import ModelFile, Region, next_data, unreadable, write_atomically
from stages.process_limits import num_usable
from stages.weights.recipe import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Sequence
    from pathlib import Path

# Bytes that a thread reads at a time.
_BUFFER_BYTES: Final = 1024 * 1024
_MOST_THREADS: Final = 4

Work = TypeVar("Work")
Found = TypeVar("Found")


@dataclass(frozen=True)
class FileStamp:
    """File identity and times: shows whether a file's content may have changed.

    The time of the last status change cannot be set: a file that was altered and given its old modification
    time has another.
    """

    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Current stamp of a file.

        Raises:
            InvalidModel: If it is gone.
        """
        try:
            status = path.stat()
        except OSError as error:
            raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class ModelHashes:
    """Hashes of one model.

    Args:
        paths: Files of the model.
        index: File in which hashes are kept.
    """

    def __init__(self, paths: Sequence[Path], index: Path) -> None:
        self._paths = tuple(paths)
        self._index = index
        self._stamps = stamps_of(paths)
        self._known = self._load()
        self._lock = threading.Lock()

    @property
    def is_current(self) -> bool:
        """Whether the model's files are unchanged."""
        return stamps_of(self._paths) == self._stamps

    def missing_bytes(self, regions: Collection[Region]) -> int:
        """Number of bytes to be read for the hashes of these regions."""
        return sum(region.num_bytes for region in set(regions) if region not in self._known)

    def of(
        self, regions: Collection[Region], on_bytes: Callable[[int], None]
    ) -> dict[Region, tuple[str, ...]]:
        """Hashes of each `PIECE_BYTES` of some regions, computed once.

        Args:
            regions: The regions.
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


@cache
def zeros_sha256(num_bytes: int) -> str:
    """sha256 of this many zeros, hex: they need not be read, sent or written."""
    digest = hashlib.sha256()
    buffer = bytes(min(num_bytes, _BUFFER_BYTES))
    for start in range(0, num_bytes, _BUFFER_BYTES):
        digest.update(buffer[: num_bytes - start])
    return digest.hexdigest()


def piece_sha256(descriptor: int, start: int, num_bytes: int) -> str | None:
    """Hash part of an open file.

    Returns:
        The sha256, hex; None if the file ends before.

    Raises:
        OSError: If it cannot be read.
    """
    if os.fstat(descriptor).st_size < start + num_bytes:
        return None
    stop = start + num_bytes
    if next_data(descriptor, start, stop)[0] == stop:
        return zeros_sha256(num_bytes)
    digest = hashlib.sha256()
    while start < stop:
        chunk = os.pread(descriptor, min(stop - start, _BUFFER_BYTES), start)
        if not chunk:
            return None
        digest.update(chunk)
        start += len(chunk)
    return digest.hexdigest()


def region_sha256(descriptor: int, region: Region, offset: int, num_bytes: int) -> str | None:
    """Hash part of a region of an open file; see `piece_sha256`.

    Args:
        descriptor: Descriptor of the region's file.
        region: The region.
        offset: First byte within the region.
        num_bytes: Number of bytes.
    """
    if region.is_whole:
        return piece_sha256(descriptor, region.start + offset, num_bytes)

    def read_at(start: int, length: int) -> bytes:
        return os.pread(descriptor, length, start)

    digest = hashlib.sha256()
    stop = offset + num_bytes
    while offset < stop:
        chunk = region.read(read_at, offset, min(stop - offset, _BUFFER_BYTES))
        if not chunk:
            return None
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest()


def in_threads(
    work: Callable[[Work], Found], items: Iterable[Work]
) -> Generator[tuple[Work, Found], None, None]:
    """Apply a function to many items, several at a time; results are in the order of the items.

    Closing the iterator ends it: items that were not begun are skipped.
    """
    pool = ThreadPoolExecutor(min(_MOST_THREADS, num_usable()), thread_name_prefix="hash")
    try:
        tasks = [(item, pool.submit(work, item)) for item in items]
        for item, task in tasks:
            yield item, task.result()
    finally:
        pool.shutdown(cancel_futures=True)


def stamps_of(paths: Iterable[Path]) -> tuple[FileStamp, ...]:
    """Of every file; see `FileStamp.of`."""
    return tuple(FileStamp.of(path) for path in paths)
