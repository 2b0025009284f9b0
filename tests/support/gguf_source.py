"""GGUF files from which others are written: gguf-py takes seconds to read the vocabulary of a real model."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from stages.gguf import read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from gguf.constants import GGMLQuantizationType
    from numpy.typing import NDArray

    from stages.gguf import TensorInfo

_DTYPES = {
    gguf.GGMLQuantizationType.F32: np.float32,
    gguf.GGMLQuantizationType.F16: np.float16,
    gguf.GGMLQuantizationType.I64: np.int64,
    gguf.GGMLQuantizationType.I32: np.int32,
}


@dataclass(frozen=True)
class SourceTensor:
    """A tensor as gguf-py's writer takes it."""

    name: str
    shape: tuple[int, ...]
    """Elements per dimension, fastest first, as in the file."""
    tensor_type: GGMLQuantizationType
    data: NDArray[Any]
    """Rows of numbers, or of the bytes of quantised blocks."""


class GgufSource:
    """A file's metadata and tensors.

    Args:
        path: The file, of a model in one part.
    """

    def __init__(self, path: Path) -> None:
        self.header = read_header(path)
        self._bytes = np.memmap(path, mode="r")

    @functools.cached_property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """By name, in the order of the file."""
        return {name: self._tensor(info) for name, info in self.header.tensors.items()}

    def value(self, key: str) -> Any:
        """A value of the metadata."""
        return self.header.metadata[key].decode()

    def copy_metadata(self, writer: gguf.GGUFWriter, is_kept: Callable[[str], bool]) -> None:
        """Write its metadata into another file.

        Args:
            writer: Of that file; it has its own architecture.
            is_kept: Whether a key is written.
        """
        for key, value in self.header.metadata.items():
            if key == "general.architecture" or not is_kept(key):
                continue
            kind = gguf.GGUFValueType(value.type)
            if value.count is None:
                writer.add_key_value(key, value.decode(), kind)
            else:
                writer.add_key_value(key, value.decode(), gguf.GGUFValueType.ARRAY, kind)

    def _tensor(self, info: TensorInfo) -> SourceTensor:
        stored = self._bytes[info.offset_bytes : info.offset_bytes + info.n_bytes]
        rows = tuple(reversed(info.shape))
        if info.type in _DTYPES:
            data = stored.view(_DTYPES[info.type]).reshape(rows)
        else:
            data = stored.reshape(gguf.quants.quant_shape_to_byte_shape(rows, info.type))
        return SourceTensor(info.name, info.shape, info.type, data)
