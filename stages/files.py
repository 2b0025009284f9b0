"""Files: folders of this user, whole or atomic writes, locks, copies by the kernel, and disk errors."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple, Self

from spanmesh_proto.errors import ClusterError, InvalidModel, ModelError
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
# On file systems with shared blocks (XFS, Btrfs) the kernel copies aligned blocks by reference. Holes stay
# holes: zeros that were never written are neither read nor written.
BLOCK_BYTES: Final = 4096
# Interval of progress reports, where a copy can be interrupted.
STEP_BYTES: Final = 16 * 1024 * 1024
_BUFFER_BYTES: Final = 1024 * 1024
# Errors of files that the kernel cannot copy, and errors that do not tell the side.
_NOT_BY_KERNEL: Final = frozenset(
    {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EIO, errno.EBADF}
)


class UnreadableError(Exception):
    """Reading failed; the cause has the reason."""


class ModelFile:
    """Open files of a model.

    Args:
        paths: Its files, in order.

    Raises:
        InvalidModel: If one cannot be read, when opened or later.
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
        """Descriptor of one of the files, for reading."""
        return self._descriptors[file]

    def read_at(self, position: int, count: int, file: int = 0) -> bytes:
        """Up to `count` bytes from `position` on; empty at the end of the file."""
        try:
            return os.pread(self._descriptors[file], count, position)
        except OSError as error:
            raise unreadable(self.paths[file], error) from error


class Region(NamedTuple):
    """A range of a model's file, or rows of equal length at equal distance."""

    file: int
    """Index of the file, from 0."""
    start: int
    """First byte in the file."""
    num_bytes: int
    """Number of bytes in the region."""
    row_bytes: int = 0
    """Bytes of each row; 0 for a single range."""
    stride_bytes: int = 0
    """Distance of the rows' first bytes."""

    @property
    def is_whole(self) -> bool:
        """Whether it is a single range."""
        return not self.row_bytes

    def stretches(self, offset: int, count: int) -> Iterator[tuple[int, int]]:
        """Ranges in the file of `count` bytes of the region from `offset` on: first byte and length."""
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
        """Read bytes of the region.

        Args:
            read_at: Reads up to a number of bytes (second) from a position in the file on (first).
            offset: First byte within the region.
            count: Number of bytes.

        Returns:
            The bytes; fewer if the file ends before, or if `read_at` returns fewer.
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


@contextmanager
def whole_file(path: Path, *, is_private: bool = False, is_durable: bool = True) -> Iterator[BinaryIO]:
    """A file that gets its name at the end of the block; on any exception, Ctrl-C included, it is removed.

    A reader sees the old content or the new, never a part.

    Args:
        path: Replaced if it exists.
        is_private: Whether only this user may read it.
        is_durable: Whether it survives a power cut from the end of the block on.

    Raises:
        OSError: If the folder cannot be written to, or its disk is full.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    mode = 0o600 if is_private else 0o666

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    with open(partial, "xb", opener=opener) as file:
        try:
            yield file
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            # On a full disk the rest would take the room that the next attempt needs.
            partial.unlink(missing_ok=True)
            raise
    if is_durable:
        sync(path.parent)


def write_private_file(path: Path, text: str) -> None:
    """Write a file that only this user may read, in one step; the target of a link is replaced.

    Raises:
        OSError: If the folder cannot be written to.
    """
    with whole_file(path.resolve(), is_private=True) as file:
        file.write(text.encode())


def sync(path: Path) -> None:
    """Make the content of a file durable, or renames in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file against other descriptors, until this one is closed; returns whether it was free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def locked(path: Path) -> int:
    """Lock a file, for this process and as long as its descriptor is open.

    Args:
        path: The lock, not what it guards, which is replaced when it is written; made if it is missing.

    Returns:
        Its descriptor.

    Raises:
        BlockingIOError: If another descriptor holds the lock.
        OSError: If the file cannot be made or opened.
    """
    lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def user_folder(variable: str, *below_home: str) -> Path:
    """A folder of the XDG base directories, `spanmesh` in it left out.

    Args:
        variable: Variable that names it, such as `XDG_CACHE_HOME`.
        below_home: Names of the folders that lead to it from the home directory, without the variable.

    Raises:
        ClusterError: If neither the variable nor a home directory is known, as for a user of a container that
            its list of users lacks.
    """
    named = os.environ.get(variable)
    if named:
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    # A relative HOME would put the files wherever this was started.
    if not home.is_absolute():
        raise ClusterError(
            f"user {os.geteuid()} has no home directory, and {variable} is not set: set HOME or {variable} "
            "to a folder that this user may write to"
        )
    return home.joinpath(*below_home)


def require_disk(path: Path, needed_bytes: int) -> None:
    """Check that the disk has room for a file.

    Args:
        path: Path of the file; its folder must exist.
        needed_bytes: Number of bytes to be written.

    Raises:
        ModelError: If less is free.
    """
    if needed_bytes > shutil.disk_usage(path.parent).free:
        raise _no_room(path, needed_bytes)


def write_error(path: Path, error: OSError, needed_bytes: int | None = None) -> ModelError:
    """The error for a failed write.

    Args:
        path: Path of the file.
        error: Error of the system.
        needed_bytes: Number of bytes that were to be written, if known.
    """
    if error.errno in _FULL:
        return _no_room(path, needed_bytes)
    return ModelError(f"cannot write {path}: {error.strerror or error}")


def _no_room(path: Path, needed_bytes: int | None) -> ModelError:
    free = format_size(shutil.disk_usage(path.parent).free)
    needed = "" if needed_bytes is None else f"{format_size(needed_bytes)} are needed, "
    return ModelError(
        f"cannot write {path}: the disk is full: {needed}{free} are free; make room, for example with "
        "`mesh models prune`, or set XDG_CACHE_HOME to a folder on a larger disk"
    )


@contextmanager
def atomic_write(path: Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """A file that gets its name at the end of the block; on any exception, Ctrl-C included, it is removed.

    Args:
        path: Replaced if it exists.
        is_private: Whether only this user may read it.

    Raises:
        ModelError: If the folder cannot be written to, or its disk is full.
    """
    try:
        with whole_file(path, is_private=is_private) as file:
            yield file
    except OSError as error:
        raise write_error(path, error) from error


def write_atomically(path: Path, text: str) -> None:
    """Write a small file, creating its folder if needed.

    Raises:
        ModelError: If the folder cannot be written to, or its disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot make the folder {path.parent}: {error.strerror or error}") from error
    with atomic_write(path) as file:
        file.write(text.encode())


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
        target: Descriptor to write to; the file is at least as long as needed.
        at: First byte there.
        count: Number of bytes.
        on_bytes: Called with the number of bytes just copied.

    Returns:
        Number of copied bytes; fewer than `count` if the source ends.

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
        place: The region, and the first byte within it.
        target: Descriptor to write to.
        at: First byte there.
        count: Number of bytes.
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
    """Bytes to the next block, if both have the same offset in their blocks: only whole blocks are shared."""
    if start % BLOCK_BYTES and (start - at) % BLOCK_BYTES == 0:
        return BLOCK_BYTES - start % BLOCK_BYTES
    return STEP_BYTES


def next_data(descriptor: int, start: int, stop: int) -> tuple[int, int]:
    """The next range of data within `[start, stop)`, without holes.

    Returns:
        `(stop, stop)` if there is none. Where holes are not supported, all is data.
    """
    # Elsewhere holes are not relied on: data taken for a hole would be lost weights, and that is untried.
    if sys.platform != "linux":
        return start, stop
    try:
        data = os.lseek(descriptor, start, os.SEEK_DATA)
        hole = os.lseek(descriptor, data, os.SEEK_HOLE) if data < stop else stop
    except OSError as error:
        return (stop, stop) if error.errno == errno.ENXIO else (start, stop)
    return min(data, stop), min(hole, stop)


def _clear(target: int, start: int, stop: int) -> None:
    """Write zeros over the content of an earlier try."""
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
    """Write at a position, in as many calls as needed."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


def unreadable(path: Path, error: BaseException) -> InvalidModel:
    """The error for a failed read."""
    reason = error.strerror if isinstance(error, OSError) else None
    return InvalidModel(f"{path} cannot be read: {reason or error}")
