"""GGUF headers: metadata and tensor descriptions as bytes, read and checked, also of models in several parts.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. gguf-py's reader turns every token of the
vocabulary into numpy views, which takes seconds for a large vocabulary; here values stay encoded until asked
for, so a header takes tens of milliseconds and its values go into a stage file bit for bit.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from spanmesh_proto.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

Scalar = int | float | bool | str
# The first file has all metadata and the first tensors; the others have tensors and the number of their part.
_NAME: Final = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})")
MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMS: Final = 4
# The format's own limit for keys; tensors' names are shorter.
_MAX_NAME_BYTES: Final = 65_535
# A metadata entry takes at least its key's length, its type and a byte; a tensor takes its name's length, the
# number of its dimensions, its type and its offset. Larger counts are refused before they are used.
_LEAST_KEY_BYTES: Final = 8 + 4 + 1
_LEAST_TENSOR_BYTES: Final = 8 + 4 + 4 + 8


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
        numbers = self.integers(key)
        if numbers is None:
            return (self.integer(key, default),) * n_layers
        if len(numbers) != n_layers:
            raise InvalidModel(
                f"{self.path}: metadata key {key!r} has {len(numbers)} entries, need {n_layers}"
            )
        return numbers

    def integers(self, key: str) -> tuple[int, ...] | None:
        """An array of integers of the metadata; None if it is absent, or no array.

        Raises:
            InvalidModel: If it is an array of something else.
        """
        value = self.metadata.get(key)
        found = None if value is None else value.decode()
        if not isinstance(found, tuple):
            return None
        for number in found:
            if isinstance(number, str) or not math.isfinite(number) or number != int(number):
                raise InvalidModel(f"{self.path}: metadata key {key!r} lists {number!r}, need integers")
        return tuple(int(number) for number in found)

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


class _Reader:
    """Parser of one header. A short read means a truncated file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._position = len(MAGIC)

    def header(self) -> GgufHeader:
        try:
            return self._header()
        except (struct.error, OverflowError, IndexError) as error:
            raise InvalidModel(
                f"{self._path} is truncated: {len(self._data)} bytes end inside the header; fetch it again"
            ) from error

    def _header(self) -> GgufHeader:
        version = self._number("I")
        if version not in _VERSIONS:
            kind = "big-endian" if version > 0xFFFF else f"version {version}"
            raise InvalidModel(
                f"{self._path} is a {kind} GGUF, need little-endian version 2 or 3; convert it again"
            )
        n_tensors = self._number("Q")
        n_keys = self._number("Q")
        if n_tensors * _LEAST_TENSOR_BYTES + n_keys * _LEAST_KEY_BYTES > len(self._data) - self._position:
            raise struct.error
        metadata: dict[str, Value] = {}
        for _ in range(n_keys):
            key = self._text()
            if key in metadata:
                raise InvalidModel(f"{self._path}: metadata key {key!r} is in the file twice")
            metadata[key] = self._value(key)
        infos = [self._tensor() for _ in range(n_tensors)]
        alignment = self._alignment(metadata)
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise InvalidModel(f"{self._path}: tensor {name!r} is in the file twice")
            n_bytes = self._tensor_bytes(name, shape, kind)
            tensors[name] = TensorInfo(name, shape, kind, data_start + offset, n_bytes)
        return GgufHeader(self._path, len(self._data), alignment, metadata, tensors)

    def _number(self, code: str) -> int:
        value: int
        (value,) = struct.unpack_from("<" + code, self._data, self._position)
        self._position += struct.calcsize("<" + code)
        return value

    def _take(self, n_bytes: int) -> bytes:
        end = self._position + n_bytes
        if end > len(self._data):
            raise struct.error
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _text(self) -> str:
        n_bytes = self._number("Q")
        if n_bytes > _MAX_NAME_BYTES:
            raise InvalidModel(
                f"{self._path}: a name of {n_bytes} bytes, at most {_MAX_NAME_BYTES} exist; fetch it again"
            )
        return self._take(n_bytes).decode(errors="replace")

    def _kind(self, key: str) -> ValueType:
        number = self._number("I")
        try:
            return ValueType(number)
        except ValueError as error:
            raise InvalidModel(f"{self._path}: metadata key {key!r} has unknown type {number}") from error

    def _value(self, key: str) -> Value:
        kind = self._kind(key)
        count: int | None = None
        if kind is ValueType.ARRAY:
            kind = self._kind(key)
            if kind is ValueType.ARRAY:
                raise InvalidModel(f"{self._path}: metadata key {key!r} is an array of arrays")
            count = self._number("Q")
        n_elements = 1 if count is None else count
        if kind is ValueType.STRING:
            return Value(kind, count, self._strings(n_elements))
        return Value(kind, count, self._take(n_elements * struct.calcsize("<" + FORMATS[kind])))

    def _strings(self, count: int) -> bytes:
        # The hot loop of the reader: a vocabulary has hundreds of thousands of strings.
        unpack, data, position = struct.Struct("<Q").unpack_from, self._data, self._position
        for _ in range(count):
            position += 8 + unpack(data, position)[0]
        return self._take(position - self._position)

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._text()
        n_dims = self._number("I")
        if n_dims > _MAX_DIMS:
            raise InvalidModel(
                f"{self._path}: tensor {name!r} has {n_dims} dimensions, at most {_MAX_DIMS} exist"
            )
        shape = tuple(self._number("Q") for _ in range(n_dims))
        number = self._number("I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise InvalidModel(
                f"{self._path}: tensor {name!r} has type {number}, unknown to the installed gguf package; "
                "update spanmesh, or take the model in another quantisation"
            ) from error
        return name, shape, kind, self._number("Q")

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        value = metadata.get("general.alignment")
        alignment = _DEFAULT_ALIGNMENT if value is None else value.decode()
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise InvalidModel(f"{self._path}: general.alignment is {alignment!r}, need a multiple of 8")
        return alignment

    def _tensor_bytes(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        n_elements = 1
        for extent in shape:
            n_elements *= extent
        if not shape or shape[0] % block_elements:
            raise InvalidModel(
                f"{self._path}: tensor {name!r} of shape {shape} cannot have type {kind.name}, "
                f"whose rows are multiples of {block_elements}"
            )
        n_bytes: int = n_elements // block_elements * block_bytes
        return n_bytes


def _shown(value: object) -> str:
    return "missing or an array" if value is None else repr(value)


def model_name(path: Path) -> str:
    """Name of a model by its file: without `.gguf` and the number of a part."""
    match = _NAME.fullmatch(path.stem)
    return match[1] if match else path.stem


def part_paths(first: Path) -> tuple[Path, ...]:
    """Paths of all files of a model, from the first one's name."""
    match = _NAME.fullmatch(first.stem)
    if match is None or int(match[2]) != 1:
        return (first,)
    return tuple(_part(first, number, int(match[3])) for number in range(1, int(match[3]) + 1))


def is_further_part(path: Path) -> bool:
    """Whether a file is named as a part of a model other than the first."""
    match = _NAME.fullmatch(path.stem)
    return match is not None and int(match[2]) != 1


def with_other_parts(first: GgufHeader, read: Callable[[Path], GgufHeader]) -> GgufHeader:
    """The header of a whole model, from that of its first file.

    Args:
        first: Header of the file that was named.
        read: Reads the header of another file.

    Returns:
        `first` if the model has one file; otherwise its metadata with the tensors of all files.

    Raises:
        InvalidModel: If it is not the first part, or one is missing or of another model.
    """
    count = first.integer("split.count", 0)
    if count <= 1:
        return first
    number = first.integer("split.no", 0) + 1
    match = _NAME.fullmatch(first.path.stem)
    if number != 1:
        named = f", {_part(first.path, 1, count).name}" if match else ""
        raise InvalidModel(f"{first.path} is part {number} of {count}: name the first one{named}")
    if match is None or int(match[2]) != 1 or int(match[3]) != count:
        raise InvalidModel(
            f"{first.path} is part 1 of {count}: its name must end in -00001-of-{count:05d}.gguf for the "
            "others to be found beside it; rename it"
        )
    others = (
        _read_part(_part(first.path, other, count), other, count, read) for other in range(2, count + 1)
    )
    return _combined([first, *others])


def _part(path: Path, number: int, count: int) -> Path:
    return path.with_name(f"{model_name(path)}-{number:05d}-of-{count:05d}{path.suffix}")


def _read_part(path: Path, number: int, count: int, read: Callable[[Path], GgufHeader]) -> GgufHeader:
    if not path.exists():
        raise InvalidModel(
            f"{path} is missing: it is part {number} of {count} of this model; put all parts into one folder"
        )
    part = read(path)
    said = part.integer("split.no", 0) + 1, part.integer("split.count", 1)
    if said != (number, count):
        raise InvalidModel(
            f"{path} says that it is part {said[0]} of {said[1]}, not part {number} of {count} as its name "
            "does: it was renamed, or it is of another model; fetch all parts again"
        )
    return part


def _combined(parts: list[GgufHeader]) -> GgufHeader:
    first = parts[0]
    tensors: dict[str, TensorInfo] = {}
    for index, part in enumerate(parts):
        if "general.architecture" in part.metadata and part.architecture != first.architecture:
            raise InvalidModel(
                f"{part.path} is of a {part.architecture!r} model, {first.path.name} of a "
                f"{first.architecture!r} one: fetch all parts of one model"
            )
        for tensor in part.tensors.values():
            if tensor.name in tensors:
                other = parts[tensors[tensor.name].file].path.name
                raise InvalidModel(
                    f"{part.path}: tensor {tensor.name!r} is in {other} as well: the parts are of different "
                    "models; fetch all parts of one"
                )
            tensors[tensor.name] = replace(tensor, file=index)
    said = first.integer("split.tensors.count", len(tensors))
    if said != len(tensors):
        raise InvalidModel(
            f"{first.path} says that its {len(parts)} parts hold {said} tensors, they hold {len(tensors)}: "
            "they are of different models; fetch all parts of one"
        )
    return replace(
        first,
        file_bytes=sum(part.file_bytes for part in parts),
        tensors=tensors,
        other_paths=tuple(part.path for part in parts[1:]),
    )


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a model, of all its files if it has several.

    Args:
        path: A GGUF file, version 2 or 3, little-endian; the first one of a model in several.

    Returns:
        The header; every tensor in it lies inside its file.

    Raises:
        InvalidModel: If a file cannot be read, is not such a GGUF, or is truncated, or if the files do not
            belong together.
    """
    return with_other_parts(read_one_header(path), read_one_header)


def read_one_header(path: Path) -> GgufHeader:
    """The header of one file, which may be a part of a model.

    Raises:
        InvalidModel: If the file cannot be read, is not such a GGUF, or is truncated.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidModel(f"{path} is not a GGUF file: it is no regular file")
            if file.read(4) != MAGIC:
                raise InvalidModel(f"{path} is not a GGUF file: it does not start with the bytes 'GGUF'")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Reader(path, data).header()
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
    _refuse_truncated(header)
    return header


def _open_at_once(path: str, flags: int) -> int:
    # A pipe would be waited for until something writes to it, by a thread that nothing ends.
    return os.open(path, flags | os.O_NONBLOCK)


def _refuse_truncated(header: GgufHeader) -> None:
    for tensor in header.tensors.values():
        end = tensor.offset_bytes + tensor.n_bytes
        if end > header.file_bytes:
            raise InvalidModel(
                f"{header.path} is truncated: tensor {tensor.name!r} ends at byte {end}, "
                f"the file has {header.file_bytes}; fetch it again"
            )
