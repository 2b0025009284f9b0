"""Folder of block files: their format, written whole, checked on reading, bounded in size, evicted by use.

::

    <root>/ledger                                lock, and the bytes of all files below, with a checksum
    <root>/<identity>/<name>.rows                a block
    <root>/<identity>/<name>.<positions>.state   a block with the recurrent state behind so many positions

Stages of one host share a root, each with a folder of its own. The limit holds for all of them together: a
file is written while the ledger is locked, and is entered there. Files are readable by this user only, since
prompts can be reconstructed from them.

All numbers are little-endian::

    8 bytes   magic, with the version of the format
    32 bytes  digest of all that the rows depend on besides tokens, see `stages.serving.rows_identity`
    32 bytes  name of the block
    32 bytes  SHA-256 of all token ids up to the end of the block, 8 bytes each
    u32 u32   first position, last position plus one
    u64 u64   bytes of the rows, bytes of the recurrent state behind them (0 for none)
    u32 each  token ids of the block
              the rows, then the state, both in llama.cpp's format
    32 bytes  BLAKE2b of everything before

A file is used only if each of these is as expected: nothing is used of a damaged file, or of one that belongs
to another model, build or mode.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import struct
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import structlog

from stages.files import try_lock, whole_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

DIGEST_BYTES: Final = 32
"""Length of names and identities."""
_MAGIC: Final = b"SMKVROW1"
_HEAD: Final = struct.Struct(f"<8s{DIGEST_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}sIIQQ")
_TOKEN_BYTES: Final = 4
_FILE_NAME: Final = re.compile(rf"([0-9a-f]{{{2 * DIGEST_BYTES}}})(?:\.rows|\.([1-9][0-9]{{0,9}})\.state)")
_IDENTITY: Final = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
# Evicted down to this share of the limit, so that the folder is not read for every block.
_KEPT_SHARE: Final = 7 / 8
# Left free on the disk for others: so many bytes, or this share of a small disk.
_LEAST_FREE_BYTES: Final = 2**30
_LEAST_FREE_SHARE: Final = 1 / 20
_ENTRY_DIGITS: Final = 20
# A block is written in less, unless the disk is much too slow; a process that holds the ledger for longer is
# stopped. Without a limit its stop would keep other stages from ending.
_LOCK_PATIENCE_S: Final = 2.0
_LOCK_POLL_S: Final = 0.01
log = structlog.get_logger()


@dataclass(frozen=True)
class RowsBlock:
    """KV rows of consecutive positions, with their tokens."""

    start: int
    """The first position."""
    stop: int
    """Last position plus one."""
    tokens: NDArray[np.uint32]
    """Token ids of the positions, uint32 (stop - start)."""
    prefix_sha256: bytes
    """SHA-256 of all token ids from position 0 to before `stop`, int64 each."""
    rows: NDArray[np.uint8]
    """The rows, uint8 (bytes), in llama.cpp's format."""
    state: NDArray[np.uint8]
    """In models with recurrent layers perhaps the state behind the last position, uint8 (bytes), in
    llama.cpp's format; empty for none."""


@dataclass(frozen=True)
class BlockLabel:
    """Identity of a block file's content."""

    rows_identity: bytes
    """Digest of all that the rows depend on besides tokens."""
    name: bytes
    """Name of the block."""


class DamagedBlock(ValueError):
    """Reason why a file is not used; never reaches a peer."""


@dataclass(frozen=True)
class StoredBlock:
    """A block in the store."""

    num_bytes: int
    """Size of its file."""
    state_positions: int = 0
    """Number of positions up to the recurrent state in it; 0 if it has none."""


class BlockStore:
    """Block files of one stage. Its methods may be called from several threads and processes.

    Args:
        root: Folder shared by all stages of this host.
        rows_identity: Digest of all that the stage's rows depend on besides tokens.
        most_bytes: Limit of all files of the root together.
    """

    def __init__(self, root: Path, rows_identity: bytes, most_bytes: int) -> None:
        self.rows_identity = rows_identity
        self.most_bytes = most_bytes
        self._root = root
        self._folder = root / rows_identity.hex()

    def open(self) -> dict[bytes, StoredBlock]:
        """Make the folders, count what is there, and return the stage's blocks by name.

        Raises:
            OSError: If the folders cannot be made or read.
        """
        self._make_folders()
        try:
            with _Ledger(self._root) as ledger:
                self._count(ledger)
                self._make_room(ledger, 0, lambda _name: None)
        except TimeoutError as error:
            # Reading does not need it.
            log.warning("ledger_locked", reason=str(error))
        found = _files_in(self._folder)
        return {each.name: StoredBlock(each.num_bytes, each.state_positions) for each in found}

    def write(
        self,
        name: bytes,
        block: RowsBlock,
        used_ns: int,
        *,
        on_removed: Callable[[bytes], object] = lambda _name: None,
    ) -> StoredBlock | None:
        """Write a block; None if it does not fit, or the disk refuses it.

        Blocks that were used least recently are removed for it.

        Args:
            name: The block's name.
            block: The block.
            used_ns: Time of its use, see `use`.
            on_removed: Called with the names of this stage's blocks that were removed.
        """
        stored = StoredBlock(file_bytes(block), block.stop if block.state.size else 0)
        path = self._path(name, stored)
        try:
            self._make_folders()
            with _Ledger(self._root) as ledger:
                if not self._make_room(ledger, stored.num_bytes, on_removed):
                    return None
                replaced_bytes = path.stat().st_size if path.exists() else 0
                self._write(path, name, block, used_ns)
                ledger.num_bytes += stored.num_bytes - replaced_bytes
        except OSError as error:
            log.warning("block_not_written", reason=error.strerror or str(error))
            return None
        return stored

    def read(self, name: bytes, stored: StoredBlock) -> RowsBlock | None:
        """A block, checked; None if it is gone.

        Raises:
            DamagedBlock: If it is damaged or another one; it is removed.
        """
        path = self._path(name, stored)
        try:
            return self._checked(name, stored, _read(path, stored.num_bytes))
        except FileNotFoundError:
            return None
        except (OSError, DamagedBlock) as error:
            log.warning("block_damaged", path=str(path), reason=str(error))
            self._remove(path)
            raise DamagedBlock(str(error)) from error

    def remove(self, name: bytes, stored: StoredBlock) -> None:
        """Remove a block; no effect if it is gone."""
        self._remove(self._path(name, stored))

    def use(self, name: bytes, stored: StoredBlock, used_ns: int) -> None:
        """Record a use.

        Args:
            name: The block's name.
            stored: The block.
            used_ns: Time of the use, nanoseconds since the epoch; those used longest ago are removed first.
                Blocks at later positions should have earlier times than those that they depend on.
        """
        with contextlib.suppress(OSError):
            os.utime(self._path(name, stored), ns=(used_ns, used_ns))

    def _make_folders(self) -> None:
        for folder in (self._root, self._folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _checked(self, name: bytes, stored: StoredBlock, content: NDArray[np.uint8]) -> RowsBlock:
        block = decode_block(BlockLabel(self.rows_identity, name), content)
        if (block.stop if block.state.size else 0) != stored.state_positions:
            raise DamagedBlock("it has another state than its name says")
        return block

    def _write(self, path: Path, name: bytes, block: RowsBlock, used_ns: int) -> None:
        # Not made durable: after a power cut a file with holes is a damaged one.
        with whole_file(path, is_private=True, is_durable=False) as file:
            for piece in encode_block(BlockLabel(self.rows_identity, name), block):
                file.write(piece)
            file.flush()
            os.utime(file.fileno(), ns=(used_ns, used_ns))

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError), _Ledger(self._root) as ledger:
            num_bytes = path.stat(follow_symlinks=False).st_size
            path.unlink()
            ledger.num_bytes -= num_bytes

    def _make_room(self, ledger: _Ledger, num_bytes: int, on_removed: Callable[[bytes], object]) -> bool:
        """Remove blocks until another file fits; returns whether it does."""
        free_bytes = _free_bytes(self._root)
        if num_bytes > self.most_bytes:
            return False
        if not ledger.is_known:
            self._count(ledger)
        if ledger.num_bytes + num_bytes <= self.most_bytes and num_bytes <= free_bytes:
            return True
        # Files may have been removed by hand.
        files = self._count(ledger)
        kept_bytes = min(self.most_bytes - num_bytes, int(self.most_bytes * _KEPT_SHARE))
        for found in sorted(files, key=lambda found: (found.used_ns, str(found.path))):
            if ledger.num_bytes <= kept_bytes and num_bytes <= free_bytes:
                break
            try:
                found.path.unlink(missing_ok=True)
            except OSError as error:
                # One that has to stay must not keep all others.
                log.warning("block_not_removed", path=str(found.path), reason=error.strerror)
                continue
            if found.path.parent == self._folder:
                on_removed(found.name)
            ledger.num_bytes -= found.num_bytes
            free_bytes += found.num_bytes
        return ledger.num_bytes + num_bytes <= self.most_bytes and num_bytes <= free_bytes

    def _count(self, ledger: _Ledger) -> list[_BlockPath]:
        """Blocks of all stages, entered in the ledger."""
        files: list[_BlockPath] = []
        for folder in self._root.iterdir():
            if _IDENTITY.fullmatch(folder.name) and folder.is_dir():
                # Nothing is written while the ledger is locked: these are of killed processes.
                for partial in folder.glob(".*.part"):
                    partial.unlink(missing_ok=True)
                files += _files_in(folder)
        ledger.num_bytes = sum(found.num_bytes for found in files)
        ledger.is_known = True
        return files

    def _path(self, name: bytes, stored: StoredBlock) -> Path:
        suffix = f".{stored.state_positions}.state" if stored.state_positions else ".rows"
        return self._folder / f"{name.hex()}{suffix}"


@dataclass(frozen=True)
class _BlockPath:
    """A block file, by its name alone."""

    path: Path
    """The file."""
    name: bytes
    """Name of the block."""
    state_positions: int
    """See `StoredBlock`."""
    num_bytes: int
    """Its size."""
    used_ns: int
    """When it was used last, nanoseconds since the epoch."""


class _Ledger:
    """Bytes of all block files of a root, locked for a `with` block.

    Raises:
        TimeoutError: When the block is entered, if another process does not unlock it in time.

    Attributes:
        num_bytes: The bytes; written at the end of the block.
        is_known: Whether they are known: not if the ledger was lost or damaged, until files are counted.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / "ledger"
        self._descriptor = -1
        self.num_bytes = 0
        self.is_known = False

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock()
            entry = os.pread(self._descriptor, len(_entry(0)) + 1, 0)
        except BaseException:
            os.close(self._descriptor)
            raise
        number = entry[:_ENTRY_DIGITS]
        self.num_bytes = int(number) if number.isdigit() else 0
        self.is_known = entry == _entry(self.num_bytes)
        return self

    def _lock(self) -> None:
        until_s = time.monotonic() + _LOCK_PATIENCE_S
        while not try_lock(self._descriptor):
            if time.monotonic() >= until_s:
                raise TimeoutError(
                    f"another process has locked {self._path} for {_LOCK_PATIENCE_S:g} s: if one is stopped, "
                    "let it go on or end it"
                )
            time.sleep(_LOCK_POLL_S)

    def __exit__(self, *_exception: object) -> None:
        try:
            if self.is_known:
                entry = _entry(max(0, self.num_bytes))
                os.pwrite(self._descriptor, entry, 0)
                os.ftruncate(self._descriptor, len(entry))
        finally:
            os.close(self._descriptor)


def file_bytes(block: RowsBlock) -> int:
    """Size of a block's file."""
    num_tokens = block.stop - block.start
    return _HEAD.size + _TOKEN_BYTES * num_tokens + block.rows.size + block.state.size + DIGEST_BYTES


def encode_block(label: BlockLabel, block: RowsBlock) -> list[memoryview]:
    """Content of a block's file, in pieces; rows and state are not copied."""
    head = _HEAD.pack(
        _MAGIC,
        label.rows_identity,
        label.name,
        block.prefix_sha256,
        block.start,
        block.stop,
        block.rows.size,
        block.state.size,
    )
    tokens = block.tokens.astype("<u4").tobytes()
    pieces = [memoryview(piece) for piece in (head, tokens)]
    pieces += [np.ascontiguousarray(part).data for part in (block.rows, block.state) if part.size]
    return [*pieces, memoryview(_checksum(pieces))]


def decode_block(label: BlockLabel, content: NDArray[np.uint8]) -> RowsBlock:
    """Block of a file; rows and state are views of `content`.

    Args:
        label: Expected identity.
        content: All bytes of the file, uint8.

    Raises:
        DamagedBlock: If it is not this block, or any byte is not as it was written.
    """
    if content.size < _HEAD.size + DIGEST_BYTES:
        raise DamagedBlock(f"{content.size} bytes are no block")
    magic, identity, name, prefix_sha256, start, stop, num_rows_bytes, num_state_bytes = _HEAD.unpack(
        content[: _HEAD.size].tobytes()
    )
    if magic != _MAGIC:
        raise DamagedBlock("it has another format")
    num_token_bytes = _TOKEN_BYTES * (stop - start)
    expected_bytes = _HEAD.size + num_token_bytes + num_rows_bytes + num_state_bytes + DIGEST_BYTES
    if start >= stop or content.size != expected_bytes:
        raise DamagedBlock(f"it has {content.size} bytes, not {expected_bytes}")
    body = content[:-DIGEST_BYTES]
    if _checksum([np.ascontiguousarray(body).data]) != content[-DIGEST_BYTES:].tobytes():
        raise DamagedBlock("its checksum is wrong")
    if (identity, name) != (label.rows_identity, label.name):
        raise DamagedBlock("it is another block, or another stage's")
    rows_at = _HEAD.size + num_token_bytes
    state_at = rows_at + num_rows_bytes
    return RowsBlock(
        start,
        stop,
        np.frombuffer(content[_HEAD.size : rows_at].tobytes(), "<u4").astype(np.uint32),
        prefix_sha256,
        content[rows_at:state_at],
        content[state_at : state_at + num_state_bytes],
    )


def _checksum(pieces: Sequence[memoryview]) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _files_in(folder: Path) -> Iterator[_BlockPath]:
    for path in folder.iterdir():
        match = _FILE_NAME.fullmatch(path.name)
        if match is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            status = path.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                continue
            yield _BlockPath(
                path, bytes.fromhex(match[1]), int(match[2] or 0), status.st_size, status.st_mtime_ns
            )


def _free_bytes(folder: Path) -> int:
    """Bytes of the disk that may be used."""
    status = os.statvfs(folder)
    left_bytes = min(_LEAST_FREE_BYTES, int(status.f_blocks * status.f_frsize * _LEAST_FREE_SHARE))
    return status.f_bavail * status.f_frsize - left_bytes


def _read(path: Path, num_bytes: int) -> NDArray[np.uint8]:
    """All bytes of a file that should have so many, uint8.

    Raises:
        DamagedBlock: If it has another size, or is no file.
    """
    # A link would lead elsewhere, and a pipe would be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
        os.close(descriptor)
        # Before it is read: it may be larger than the memory.
        raise DamagedBlock(f"it is no file of {num_bytes} bytes")
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        content = np.empty(num_bytes, np.uint8)
        at = 0
        while at < content.size and (count := file.readinto(content.data[at:])):
            at += count
        return content[:at]


def _entry(num_bytes: int) -> bytes:
    number = b"%0*d" % (_ENTRY_DIGITS, num_bytes)
    return b"%s %08x\n" % (number, zlib.crc32(number))
