"""GGUF header: metadata values and tensor descriptions as bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gguf.constants import GGMLQuantizationType

Scalar = int | float | bool | str


@dataclass(frozen=True)
class TensorInfo:
    """Name, type and place of a tensor."""

    name: str
    """llama.cpp's name, beginning with `blk.<layer>.` in layers."""
    shape: tuple[int, ...]
    """Elements per dimension, fastest first, as in the file."""
    type: GGMLQuantizationType
    """Quantisation."""
    offset_bytes: int
    """First byte in the file."""
    n_bytes: int
    """Size without padding."""
    file: int = 0
    """Index of the file, from 0."""


@dataclass(frozen=True)
class GgufHeader:
    """A model without tensor data."""

    path: Path
    """Path of the file, or of the first one."""
    file_bytes: int
    """Size of all files."""
    alignment: int
    """Alignment of the tensors."""
    metadata: Mapping[str, Value]
    """Metadata of the first file."""
    tensors: Mapping[str, TensorInfo]
    """Tensors of all files."""
    other_paths: tuple[Path, ...] = ()
    """Paths of the files after the first."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of all files."""
        return (self.path, *self.other_paths)

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return self.text("general.architecture")

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of the metadata.

        Raises:
            InvalidModel: If it is absent without a default, or not an integer.
        """
        value = self._scalar(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidModel(f"{self.path}: metadata key {key!r} is {_shown(value)}, need an integer")
        return value

    def number(self, key: str, default: float) -> float:
        """A number of the metadata, integer or float.

        Raises:
            InvalidModel: If it is not a number.
        """
        value = self._scalar(key)
        if value is None:
            return default
        if isinstance(value, bool | str):
            raise InvalidModel(f"{self.path}: metadata key {key!r} is {_shown(value)}, need a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string of the metadata.

        Raises:
            InvalidModel: If it is absent without a default, or not a string.
        """
        value = self._scalar(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise InvalidModel(f"{self.path}: metadata key {key!r} is {_shown(value)}, need a string")
        return value

    def per_layer(self, key: str, n_layers: int, default: int) -> tuple[int, ...]:
        """An integer given once for all layers, or as an array with one for each.

        Raises:
            InvalidModel: If it is an array of another length, or not of integers.
        """
        value = self.metadata.get(key)
        if value is None or value.count is None:
            return (self.integer(key, default),) * n_layers
        numbers = value.decode()
        if not isinstance(numbers, tuple) or len(numbers) != n_layers:
            raise InvalidModel(
                f"{self.path}: metadata key {key!r} has {value.count} entries, need {n_layers}"
            )
        return tuple(int(number) for number in numbers)

    def _scalar(self, key: str) -> Scalar | None:
        value = self.metadata.get(key)
        if value is None or value.count is not None:
            return None
        decoded = value.decode()
        return None if isinstance(decoded, tuple) else decoded


class ValueType(IntEnum):
    """Metadata value types, with the format's numbers."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


FORMATS: Final[Mapping[ValueType, str]] = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class Value:
    """One metadata value, still encoded."""

    type: ValueType
    """Type of the value; of one element, for an array."""
    count: int | None
    """Number of elements of an array, or None for a scalar."""
    payload: bytes
    """The little-endian bytes of the scalar or of the elements."""

    @classmethod
    def of(cls, kind: ValueType, value: Scalar) -> Value:
        """A scalar."""
        if kind is ValueType.STRING:
            text = str(value).encode()
            return cls(kind, None, struct.pack("<Q", len(text)) + text)
        return cls(kind, None, struct.pack("<" + FORMATS[kind], value))

    @classmethod
    def array(cls, kind: ValueType, values: tuple[int | float | bool, ...]) -> Value:
        """An array of numbers or bools."""
        return cls(kind, len(values), struct.pack(f"<{len(values)}{FORMATS[kind]}", *values))

    def decode(self) -> Scalar | tuple[Scalar, ...]:
        """The value in Python's types."""
        if self.type is not ValueType.STRING:
            values = struct.unpack(
                f"<{1 if self.count is None else self.count}{FORMATS[self.type]}", self.payload
            )
            return values[0] if self.count is None else values
        texts: list[str] = []
        position = 0
        for _ in range(1 if self.count is None else self.count):
            (length,) = struct.unpack_from("<Q", self.payload, position)
            position += 8
            texts.append(self.payload[position : position + length].decode(errors="replace"))
            position += length
        return texts[0] if self.count is None else tuple(texts)

    def cut(self, start: int, stop: int) -> Value:
        """Elements `[start, stop)` of an array of numbers or bools."""
        width = struct.calcsize("<" + FORMATS[self.type])
        return Value(self.type, stop - start, self.payload[start * width : stop * width])


def _shown(value: object) -> str:
    return "missing or an array" if value is None else repr(value)
