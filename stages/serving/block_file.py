"""Format of a block file: KV rows of consecutive positions, checked to the last byte.

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

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

DIGEST_BYTES: Final = 32
"""Length of names and identities."""

_MAGIC: Final = b"SMKVROW1"
_HEAD: Final = struct.Struct(f"<8s{DIGEST_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}sIIQQ")
_TOKEN_BYTES: Final = 4


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
