"""Writing a stage file: header, then tensor bytes copied from the source."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, BinaryIO, Final

from spanmesh_proto.errors import InvalidModel
from stages.gguf.file_io import UnreadableError, copy_region, unreadable, write_all
from stages.gguf.header import Value, ValueType
from stages.gguf.reader import MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable

    from stages.cutting.layout import StageLayout, StageTensor
    from stages.gguf.file_io import ModelFile, Region

_VERSION: Final = 3


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
        offset += padded(tensor.n_bytes, layout.alignment)
    header = b"".join(parts)
    return header.ljust(padded(len(header), layout.alignment), b"\0")


def stage_bytes(layout: StageLayout) -> int:
    """Size of the file that `StageWriter` makes of a layout."""
    return len(encode_header(layout)) + sum(
        padded(tensor.n_bytes, layout.alignment) for tensor in layout.tensors
    )


class StageWriter:
    """Writes one stage file in constant memory; zeros stay holes.

    Args:
        source: The whole model's files.
        output: Where to write; empty.
        on_bytes: Called with the number of bytes just written.
    """

    def __init__(self, source: ModelFile, output: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._source = source
        self._output = output
        self._on_bytes = on_bytes

    def write(self, layout: StageLayout) -> None:
        """Write the whole file.

        Raises:
            InvalidModel: If the source ends early or cannot be read.
        """
        header = encode_header(layout)
        self._output.truncate(stage_bytes(layout))
        write_all(self._output.fileno(), header, 0)
        self._on_bytes(len(header))
        at = len(header)
        for tensor in layout.tensors:
            padded_bytes = padded(tensor.n_bytes, layout.alignment)
            if tensor.source is None:
                self._on_bytes(padded_bytes)
            else:
                self._copy(tensor, tensor.source, at)
                self._on_bytes(padded_bytes - tensor.n_bytes)
            at += padded_bytes

    def _copy(self, tensor: StageTensor, region: Region, at: int) -> None:
        path = self._source.paths[region.file]
        try:
            copied = copy_region(
                self._source.descriptor(region.file),
                (region, 0),
                self._output.fileno(),
                at,
                tensor.n_bytes,
                on_bytes=self._on_bytes,
            )
        except UnreadableError as error:
            raise unreadable(path, error.__cause__ or error) from error
        if copied < tensor.n_bytes:
            raise InvalidModel(f"{path} ended inside tensor {tensor.name!r} while it was being cut")


def padded(n_bytes: int, alignment: int) -> int:
    """With what it takes to the next multiple of the alignment."""
    return -(-n_bytes // alignment) * alignment


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if value.count is None:
        return struct.pack("<I", value.type) + value.payload
    return struct.pack("<IIQ", ValueType.ARRAY, value.type, value.count) + value.payload
