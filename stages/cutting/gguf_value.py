"""Metadata values of a GGUF file, kept as the bytes that they are in the file."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

Scalar = int | float | bool | str


class ValueType(IntEnum):
    """Metadata value types, with the numbers that the format gives them."""

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
    """One metadata value, still encoded.

    Attributes:
        type: Type of the value; of one element, for an array.
        count: Number of elements of an array, or None for a scalar.
        payload: The little-endian bytes of the scalar or of the elements.
    """

    type: ValueType
    count: int | None
    payload: bytes

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
        """The value as Python sees it."""
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
