"""Stage writer: stage files from a layout, and blank stages."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, Final

from spanmesh_proto.errors import InvalidModel, ModelError
from stages.files import (
    BLOCK_BYTES,
    ModelFile,
    UnreadableError,
    atomic_write,
    copy_region,
    unreadable,
    write_all,
)
from stages.gguf import MAGIC, Value, ValueType
from stages.slicing.layout import lay_out
from stages.slicing.tensor_names import layer_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stages.files import Region
    from stages.layers import LayerRange
    from stages.slicing.layout import StageLayout, StageTensor
    from stages.slicing.source_model import SourceModel

_VERSION: Final = 3
# Disk blocks are shared as a whole: copied bytes must have the same offset within a block in both files.
# Adjacent layers of the model are adjacent in the stage, too; so it suffices to align their beginning. The
# padding is put into the header, as an unused value.
_KEY: Final = "spanmesh.padding"
# Smaller tensors do not matter.
_LEAST_BYTES: Final = 64 * 1024


class StageWriter:
    """Writes one stage file in constant memory; zeros become holes.

    Args:
        source: Files of the whole model.
        output: File to write; empty.
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


class ByteCounter:
    """Adds up bytes and reports progress.

    Args:
        total: Total number of bytes.
        progress: Called with the number of bytes done and of all bytes, if given.
    """

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0

    def add(self, count: int) -> None:
        """Add bytes just done."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


# llama.cpp loads one like any other and computes in it for as long as in the real stage, since the time of a
# matrix product does not depend on its values. It takes no disk (the file is sparse) and next to nothing on
# the wire, so any host can time it before anything is cut or sent.
@dataclass(frozen=True)
class BlankStage:
    """A stage file without weights."""

    header: bytes
    """Magic, metadata and tensor directory."""
    num_bytes: int
    """Size of the file."""

    def write(self, path: Path) -> None:
        """Write the file; all but the header is a hole.

        Raises:
            ModelError: If it cannot be written.
        """
        try:
            with path.open("wb") as file:
                file.write(self.header)
                file.truncate(self.num_bytes)
        except OSError as error:
            raise ModelError(f"cannot write {path}: {error.strerror or error}") from error


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


def padded(n_bytes: int, alignment: int) -> int:
    """Size padded to a multiple of the alignment."""
    return -(-n_bytes // alignment) * alignment


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if value.count is None:
        return struct.pack("<I", value.type) + value.payload
    return struct.pack("<IIQ", ValueType.ARRAY, value.type, value.count) + value.payload


def with_shared_blocks(layout: StageLayout) -> StageLayout:
    """The same stage, with its first large tensor of a layer at the model's offset within a block."""
    at = 0
    for tensor in layout.tensors:
        is_large = tensor.n_bytes >= _LEAST_BYTES and layer_of(tensor.name) is not None
        if is_large and tensor.source is not None:
            bare = _with_padding(layout, 0)
            missing = (tensor.source.start - len(encode_header(bare)) - at) % BLOCK_BYTES
            # A multiple of the alignment, unless the model's actual alignment differs.
            return layout if missing % layout.alignment else _with_padding(layout, missing)
        at += padded(tensor.n_bytes, layout.alignment)
    return layout


def _with_padding(layout: StageLayout, num_bytes: int) -> StageLayout:
    padding = Value.of(ValueType.STRING, " " * num_bytes)
    return replace(layout, metadata={**layout.metadata, _KEY: padding})


def write_stage(
    model: SourceModel, layers: LayerRange, output: Path, on_bytes: Callable[[int], None]
) -> None:
    """Write a stage file by the rules, unchecked: `cut_stage` asks first whether they are enough.

    Raises:
        ModelError: If the output cannot be written, or is the source itself.
        InvalidModel: If the source ends early or cannot be read.
    """
    if output.exists() and any(output.samefile(path) for path in model.header.paths):
        raise ModelError(f"the output {output} is the model itself; choose another name")
    with ModelFile(*model.header.paths) as reader, atomic_write(output) as file:
        StageWriter(reader, file, on_bytes).write(with_shared_blocks(lay_out(model, layers)))


def blank_stage(source: SourceModel, layers: LayerRange) -> BlankStage:
    """The stage of these layers without its weights.

    Args:
        source: The whole model.
        layers: The layers, within the model.

    Raises:
        UncuttableModel: If it has no such layers, or cannot be cut there.
    """
    source.check_range(layers)
    layout = lay_out(source, layers)
    return BlankStage(encode_header(layout), stage_bytes(layout))
