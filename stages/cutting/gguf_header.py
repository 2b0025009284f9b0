"""The header of a GGUF file: metadata and tensor directory, never tensor data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spanmesh_proto.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gguf.constants import GGMLQuantizationType

    from stages.cutting.gguf_value import Scalar, Value


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        name: As llama.cpp knows it, `blk.<layer>.` first for a layer's own.
        shape: Elements per dimension, fastest first, as in the file.
        type: Quantisation.
        offset_bytes: From the start of the file.
        n_bytes: Without padding.
        file: Which of the model's files, from 0.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset_bytes: int
    n_bytes: int
    file: int = 0


@dataclass(frozen=True)
class GgufHeader:
    """Everything in a model but the tensor data.

    Attributes:
        path: The file; the first one if there are several.
        file_bytes: Size of all files.
        alignment: Of the tensors in them.
        metadata: Of the first one.
        tensors: Of all of them.
        other_paths: The files after the first.
    """

    path: Path
    file_bytes: int
    alignment: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    other_paths: tuple[Path, ...] = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file."""
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
        """A number of the metadata, whole or not.

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
        """An integer that the file gives once for all layers, or as an array with one for each.

        Raises:
            InvalidModel: If it is an array of another length, or holds no integers.
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


def _shown(value: object) -> str:
    return "missing or an array" if value is None else repr(value)
