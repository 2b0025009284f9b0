"""sha256 of stretches of files, several at a time, in constant memory."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Final, TypeVar

from stages.gguf.file_io import next_data

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from stages.gguf.file_io import Region

Work = TypeVar("Work")
Found = TypeVar("Found")

# A thread reads so much at a time.
_BUFFER_BYTES: Final = 1024 * 1024
_MOST_THREADS: Final = 4


@cache
def zeros_sha256(num_bytes: int) -> str:
    """Of so many zeros, hex: they need not be read, sent or written."""
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
    """Hash some bytes of a region of an open file; see `piece_sha256`.

    Args:
        descriptor: Of the region's file.
        region: What to read from.
        offset: First byte, among the region's.
        num_bytes: How many.
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
    """Do the same with many things, several at a time; what comes out comes in their order.

    Whoever stops to listen ends it: what was not begun is not done.
    """
    pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="hash")
    try:
        tasks = [(item, pool.submit(work, item)) for item in items]
        for item, task in tasks:
            yield item, task.result()
    finally:
        pool.shutdown(cancel_futures=True)
