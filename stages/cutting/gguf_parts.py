"""Models in several files, as llama.cpp's `llama-gguf-split` writes them: `NAME-00001-of-00003.gguf`, ….

The first file has all metadata and the first tensors; the others have tensors, and say which part they are.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stages.cutting.gguf_header import GgufHeader, TensorInfo

_NAME: Final = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})")


def model_name(path: Path) -> str:
    """What a model is called by its file: the name without `.gguf`, and without the number of a part."""
    match = _NAME.fullmatch(path.stem)
    return match[1] if match else path.stem


def part_paths(first: Path) -> tuple[Path, ...]:
    """Every file of a model by the name of its first one, whether it is there or not."""
    match = _NAME.fullmatch(first.stem)
    if match is None or int(match[2]) != 1:
        return (first,)
    return tuple(_part(first, number, int(match[3])) for number in range(1, int(match[3]) + 1))


def with_other_parts(first: GgufHeader, read: Callable[[Path], GgufHeader]) -> GgufHeader:
    """The header of a whole model, given that of the file that the user named.

    Args:
        first: Of that file.
        read: Reads the header of another file.

    Returns:
        `first` if the model has one file; else its metadata with the tensors of all files.

    Raises:
        InvalidModel: If it is not the first part, or one is missing, another's, or of another model.
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
