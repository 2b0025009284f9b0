"""Copying parts of files in constant memory, by the kernel where it can.

On file systems that share blocks (XFS, Btrfs) the kernel copies by reference what lies alike in both files.
Holes stay holes: zeros that nobody has written are neither read nor written.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from stages.cutting.region import Place

BLOCK_BYTES: Final = 4096
# Between two signs of progress, which is where a copy can be interrupted.
STEP_BYTES: Final = 16 * 1024 * 1024
_BUFFER_BYTES: Final = 1024 * 1024
# What the kernel says of files that it cannot copy by itself, and errors that say not which side they are of.
_NOT_BY_KERNEL: Final = frozenset(
    {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EIO, errno.EBADF}
)


class UnreadableError(Exception):
    """The side that is read from failed; its cause says how."""


def copy_range(
    source: int,
    start: int,
    target: int,
    at: int,
    count: int,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> int:
    """Copy bytes from one open file to a place in another.

    Args:
        source: Descriptor to read from.
        start: First byte there.
        target: Descriptor to write to; at least as long as what is copied needs.
        at: First byte there.
        count: How many.
        on_bytes: Called with the number of bytes just copied.

    Returns:
        How many were copied; fewer than `count` if the source ends.

    Raises:
        OSError: If the target cannot be written.
        UnreadableError: If the source cannot be read.
    """
    count = min(count, max(0, os.fstat(source).st_size - start))
    done = 0
    while done < count:
        data, stop = next_data(source, start + done, start + count)
        if data > start + done:
            _clear(target, at + done, at + data - start)
            if on_bytes is not None:
                on_bytes(data - start - done)
            done = data - start
        while start + done < stop:
            step = _copy(
                source,
                start + done,
                target,
                at + done,
                min(_step(start + done, at + done), stop - start - done),
            )
            if not step:
                return done
            done += step
            if on_bytes is not None:
                on_bytes(step)
    return done


def copy_region(
    source: int,
    place: Place,
    target: int,
    at: int,
    count: int,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> int:
    """Copy bytes of a region of one open file to a place in another; see `copy_range`.

    Args:
        source: Descriptor of the region's file.
        place: What to copy from, and the first byte among the region's.
        target: Descriptor to write to.
        at: First byte there.
        count: How many.
        on_bytes: Called with the number of bytes just copied.
    """
    region, offset = place
    if region.is_whole:
        return copy_range(source, region.start + offset, target, at, count, on_bytes=on_bytes)

    def read_at(start: int, length: int) -> bytes:
        try:
            return os.pread(source, length, start)
        except OSError as error:
            raise UnreadableError from error

    done = 0
    while done < count:
        data = region.read(read_at, offset + done, min(count - done, _BUFFER_BYTES))
        if not data:
            break
        write_all(target, data, at + done)
        done += len(data)
        if on_bytes is not None:
            on_bytes(len(data))
    return done


def _step(start: int, at: int) -> int:
    """Up to the next block first, if both lie alike in their blocks: only whole blocks can be shared."""
    if start % BLOCK_BYTES and (start - at) % BLOCK_BYTES == 0:
        return BLOCK_BYTES - start % BLOCK_BYTES
    return STEP_BYTES


def next_data(descriptor: int, start: int, stop: int) -> tuple[int, int]:
    """Where the next bytes within `[start, stop)` are that are not a hole, and where they end.

    Returns:
        `(stop, stop)` if there are none. Where holes cannot be told, all is data.
    """
    try:
        data = os.lseek(descriptor, start, os.SEEK_DATA)
        hole = os.lseek(descriptor, data, os.SEEK_HOLE) if data < stop else stop
    except OSError as error:
        return (stop, stop) if error.errno == errno.ENXIO else (start, stop)
    return min(data, stop), min(hole, stop)


def _clear(target: int, start: int, stop: int) -> None:
    """Make zeros of whatever an earlier try has left there."""
    while start < stop:
        start, dirty_stop = next_data(target, start, stop)
        if start < dirty_stop:
            write_all(target, bytes(min(_BUFFER_BYTES, dirty_stop - start)), start)
            start += min(_BUFFER_BYTES, dirty_stop - start)


def _copy(source: int, start: int, target: int, at: int, count: int) -> int:
    if hasattr(os, "copy_file_range"):
        try:
            copied = os.copy_file_range(source, target, count, start, at)
        except OSError as error:
            if error.errno not in _NOT_BY_KERNEL:
                raise
        else:
            if copied:
                return copied
    try:
        data = os.pread(source, min(count, _BUFFER_BYTES), start)
    except OSError as error:
        raise UnreadableError from error
    write_all(target, data, at)
    return len(data)


def write_all(descriptor: int, data: bytes | memoryview, at: int) -> None:
    """Write at a place, however many calls it takes."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
