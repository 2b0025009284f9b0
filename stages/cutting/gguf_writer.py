"""Writing a stage file: header, then tensor bytes streamed from the source."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, BinaryIO, Final

from spanmesh_proto.errors import InvalidModel
from stages.cutting.gguf_reader import MAGIC
from stages.cutting.gguf_value import Value, ValueType

if TYPE_CHECKING:
    from collections.abc import Callable

    from stages.cutting.layout import StageLayout, StageTensor
    from stages.cutting.model_file import ModelFile

_VERSION: Final = 3
_CHUNK_BYTES: Final = 4 * 1024 * 1024


def encode_header(layout: StageLayout) -> bytes:
    """Magic, metadata and tensor directory, padded to where tensor data start."""
    parts = [MAGIC, struct.pack("<IQQ", _VERSION, len(layout.tensors), len(layout.metadata))]
    for key, value in layout.metadata.items():
        parts += (_text(key), _value(value))
    offset = 0
    for tensor in layout.tensors:
        n_dims = len(tensor.shape)
        parts += (
            _text(tensor.name),
            struct.pack(f"<I{n_dims}QIQ", n_dims, *tensor.shape, int(tensor.type), offset),
        )
        offset += _padded(tensor.n_bytes, layout.alignment)
    header = b"".join(parts)
    return header.ljust(_padded(len(header), layout.alignment), b"\0")


def stage_bytes(layout: StageLayout) -> int:
    """Size of the file that `StageWriter` makes of a layout."""
    return len(encode_header(layout)) + sum(
        _padded(tensor.n_bytes, layout.alignment) for tensor in layout.tensors
    )


class StageWriter:
    """Writes one stage file front to back in constant memory, hashing as it goes.

    Args:
        source: The whole model's file.
        output: Where to write.
        on_bytes: Called with the number of bytes just written.
    """

    def __init__(self, source: ModelFile, output: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._source = source
        self._output = output
        self._on_bytes = on_bytes
        self._hash = hashlib.sha256()

    def write(self, layout: StageLayout) -> str:
        """Write the whole file.

        Returns:
            Its sha256, hex.

        Raises:
            InvalidModel: If the source ends early or cannot be read.
        """
        self._put(encode_header(layout))
        for tensor in layout.tensors:
            self._copy(tensor)
            self._zeros(_padded(tensor.n_bytes, layout.alignment) - tensor.n_bytes)
        return self._hash.hexdigest()

    def _copy(self, tensor: StageTensor) -> None:
        if tensor.source_offset_bytes is None:
            self._zeros(tensor.n_bytes)
            return
        if tensor.piece_bytes < tensor.n_bytes and tensor.piece_bytes:
            self._copy_pieces(tensor, tensor.source_offset_bytes)
            return
        position, left = tensor.source_offset_bytes, tensor.n_bytes
        while left:
            chunk = self._source.read_at(position, min(left, _CHUNK_BYTES))
            if not chunk:
                raise InvalidModel(
                    f"{self._source.path} ended inside tensor {tensor.name!r} while it was being cut"
                )
            self._put(chunk)
            position += len(chunk)
            left -= len(chunk)

    def _copy_pieces(self, tensor: StageTensor, position: int) -> None:
        """Many at a time: a piece may be as short as one layer's part of one token's embedding."""
        piece, stride = tensor.piece_bytes, tensor.stride_bytes
        left = tensor.n_bytes // piece
        while left:
            count = min(left, max(1, _CHUNK_BYTES // stride))
            wanted = (count - 1) * stride + piece
            chunk = b""
            while len(chunk) < wanted:
                more = self._source.read_at(position + len(chunk), wanted - len(chunk))
                if not more:
                    raise InvalidModel(
                        f"{self._source.path} ended inside tensor {tensor.name!r} while it was being cut"
                    )
                chunk += more
            self._put(b"".join(chunk[first : first + piece] for first in range(0, wanted, stride)))
            position += count * stride
            left -= count

    def _zeros(self, count: int) -> None:
        for start in range(0, count, _CHUNK_BYTES):
            self._put(bytes(min(count - start, _CHUNK_BYTES)))

    def _put(self, data: bytes) -> None:
        self._output.write(data)
        self._hash.update(data)
        self._on_bytes(len(data))


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if value.count is None:
        return struct.pack("<I", value.type) + value.payload
    return struct.pack("<IIQ", ValueType.ARRAY, value.type, value.count) + value.payload
