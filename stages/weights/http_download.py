"""Whole files over HTTP: in blocks, over several connections, gone on with after any end, checked by hash."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto.errors import HubUnavailable, ModelError
from stages.gguf.file_io import require_disk, write_all, write_error
from stages.weights.assembly import note_path
from stages.weights.http_range import read_range

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = structlog.get_logger()

_BLOCK_BYTES: Final = 16 * 1024 * 1024
_NUM_CONNECTIONS: Final = 4
_BUFFER_BYTES: Final = 1024 * 1024


def download(
    url: str,
    size_bytes: int,
    sha256: str | None,
    path: Path,
    *,
    on_bytes: Callable[[int], None],
    on_hashed: Callable[[int], None] = lambda _count: None,
) -> None:
    """Bring a file; it takes its name when it is whole and has its hash.

    Args:
        url: Where it is, at a revision that does not change.
        size_bytes: Its size.
        sha256: Of its content, hex; None if the hub does not say.
        path: Where to; beside it lies what has come so far.
        on_bytes: Called with the number of bytes that came, or were here, from several threads; may raise.
        on_hashed: Called with the number of bytes just checked; may raise.

    Raises:
        HubUnavailable: If the hub refuses or does not answer, or sends what has another hash.
        ModelError: If the disk has no room for it, or cannot be written, or another process is bringing it.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(file, partial)
            require_disk(path, size_bytes - os.fstat(file).st_blocks * 512)
            _Blocks(url, size_bytes, file, note_path(partial), on_bytes).fetch()
            if sha256 is not None:
                _check(file, size_bytes, sha256, partial, on_hashed)
            os.fsync(file)
        finally:
            os.close(file)
        partial.replace(path)
        note_path(partial).unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, error, size_bytes) from error


def _lock(file: int, partial: Path) -> None:
    """Ours alone: whoever else wrote to it would find it gone, or changed, when it is done."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(file), partial.stat())
    except (BlockingIOError, FileNotFoundError):
        is_ours = False
    if not is_ours:
        raise ModelError(
            f"{partial.name.removesuffix('.partial')} is being fetched by another process: wait until that "
            "is done, then try again"
        )


class _Blocks:
    def __init__(
        self, url: str, size_bytes: int, file: int, note: Path, on_bytes: Callable[[int], None]
    ) -> None:
        self._url = url
        self._size_bytes = size_bytes
        self._file = file
        self._note_path = note
        self._on_bytes = on_bytes
        self._is_over = threading.Event()

    def fetch(self) -> None:
        note = os.open(self._note_path, os.O_RDWR | os.O_CREAT, 0o644)
        pool = ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix="hub")
        try:
            os.ftruncate(self._file, self._size_bytes)
            num_blocks = -(-self._size_bytes // _BLOCK_BYTES)
            here = os.pread(note, num_blocks, 0).ljust(num_blocks, b"\0")
            for index in range(num_blocks):
                if here[index]:
                    self._on_bytes(self._length(index))
            missing = [index for index in range(num_blocks) if not here[index]]
            for task in as_completed([pool.submit(self._fetch_block, index, note) for index in missing]):
                task.result()
        finally:
            self._is_over.set()
            pool.shutdown(cancel_futures=True)
            os.close(note)

    def _fetch_block(self, index: int, note: int) -> None:
        at = index * _BLOCK_BYTES

        def take(data: bytes) -> None:
            nonlocal at
            self._sleep(0)
            write_all(self._file, data, at)
            at += len(data)
            self._on_bytes(len(data))

        read_range(self._url, at, self._length(index), take, sleep=self._sleep)
        os.pwrite(note, b"\x01", index)

    def _sleep(self, seconds: float) -> None:
        """Not longer than anybody waits for the file."""
        if self._is_over.wait(seconds):
            raise ModelError("given up")

    def _length(self, index: int) -> int:
        return min(_BLOCK_BYTES, self._size_bytes - index * _BLOCK_BYTES)


def _check(file: int, size_bytes: int, sha256: str, partial: Path, on_hashed: Callable[[int], None]) -> None:
    digest, at = hashlib.sha256(), 0
    while at < size_bytes:
        data = os.pread(file, _BUFFER_BYTES, at)
        if not data:
            break
        digest.update(data)
        at += len(data)
        on_hashed(len(data))
    if digest.hexdigest() != sha256:
        partial.unlink()
        note_path(partial).unlink(missing_ok=True)
        raise HubUnavailable(
            f"{partial.name.removesuffix('.partial')} came with sha256 {digest.hexdigest()[:12]}, the hub "
            f"says {sha256[:12]}: it was removed; pull it again"
        )
