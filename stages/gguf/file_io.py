"""File access for models: atomic writes, copies in the kernel, strided regions, disk-full errors."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple, Self

from spanmesh_proto.errors import InvalidModel, ModelError
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def require_disk(path: Path, needed_bytes: int) -> None:
    """Refuse to begin a file that the disk has no room for.

    Args:
        path: Of the file; its folder must exist.
        needed_bytes: What is yet to be written.

    Raises:
        ModelError: If less is free.
    """
    if needed_bytes > shutil.disk_usage(path.parent).free:
        raise _no_room(path, needed_bytes)


def write_error(path: Path, error: OSError, needed_bytes: int | None = None) -> ModelError:
    """What a failed write means.

    Args:
        path: Of the file.
        error: The system's.
        needed_bytes: What was yet to be written, if that is known.
    """
    if error.errno in _FULL:
        return _no_room(path, needed_bytes)
    return ModelError(f"cannot write {path}: {error.strerror or error}")


def _no_room(path: Path, needed_bytes: int | None) -> ModelError:
    free = format_size(shutil.disk_usage(path.parent).free)
    needed = "" if needed_bytes is None else f"{format_size(needed_bytes)} are needed, "
    return ModelError(
        f"cannot write {path}: the disk is full: {needed}{free} are free there; make room, as with "
        "`mesh models prune`, or let XDG_CACHE_HOME name a folder on a larger disk"
    )


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when the block ends well; on any exception, Ctrl-C included, nothing stays.

    Raises:
        ModelError: If the folder cannot be written to, or its disk is full.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file, making its folder if needed.

    Raises:
        ModelError: If the folder cannot be written to, or its disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot make the folder {path.parent}: {error.strerror or error}") from error
    with atomic_write(path) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# On file systems that share blocks (XFS, Btrfs) the kernel copies by reference what lies alike in both files.
# Holes stay holes: zeros that nobody has written are neither read nor written.
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


class ModelFile:
    """An open model.

    Args:
        paths: Its file, or all of them.

    Raises:
        InvalidModel: If one cannot be read, here or later.
    """

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self._stack = ExitStack()
        self._descriptors: list[int] = []
        with self._stack:
            for path in paths:
                try:
                    descriptor = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise unreadable(path, error) from error
                self._stack.callback(os.close, descriptor)
                self._descriptors.append(descriptor)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        self._stack.close()

    def descriptor(self, file: int) -> int:
        """Of one of the files, to read from."""
        return self._descriptors[file]

    def read_at(self, position: int, count: int, file: int = 0) -> bytes:
        """Up to `count` bytes from `position` on; none at the end of the file."""
        try:
            return os.pread(self._descriptors[file], count, position)
        except OSError as error:
            raise unreadable(self.paths[file], error) from error


def unreadable(path: Path, error: BaseException) -> InvalidModel:
    """What a failed read means."""
    reason = error.strerror if isinstance(error, OSError) else None
    return InvalidModel(f"{path} cannot be read: {reason or error}")


class Region(NamedTuple):
    """A stretch of a model's file, or many of the same length at the same distance.

    Attributes:
        file: Which of the model's files has it, from 0.
        start: Its first byte there.
        num_bytes: How many bytes belong to it.
        row_bytes: How many lie in a row; 0 if all do.
        stride_bytes: From the start of one row to the next.
    """

    file: int
    start: int
    num_bytes: int
    row_bytes: int = 0
    stride_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether its bytes lie in a row."""
        return not self.row_bytes

    def stretches(self, offset: int, count: int) -> Iterator[tuple[int, int]]:
        """Where `count` of its bytes, from the one at `offset` on, lie in the file: first byte and number."""
        if self.is_whole:
            yield self.start + offset, count
            return
        while count > 0:
            row, skipped = divmod(offset, self.row_bytes)
            length = min(count, self.row_bytes - skipped)
            yield self.start + row * self.stride_bytes + skipped, length
            offset += length
            count -= length

    def read(self, read_at: Callable[[int, int], bytes], offset: int, count: int) -> bytes:
        """Read some of its bytes.

        Args:
            read_at: Reads up to so many bytes (second) of the file from a place on (first).
            offset: The first one's place among the region's bytes.
            count: How many.

        Returns:
            The bytes; fewer if the file ends before, or if `read_at` gives fewer.
        """
        parts = []
        for start, length in self.stretches(offset, count):
            part = read_at(start, length)
            parts.append(part)
            if len(part) < length:
                break
        return b"".join(parts)


Place = tuple[Region, int]
"""A byte of a region, by its number among them."""
