"""Pieces of a stage that this host has already: in stages of its cache, in model files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto.errors import InvalidModel, ModelError
from stages.gguf.file_io import Region, UnreadableError, copy_region
from stages.weights.file_stamp import FileStamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from stages.gguf.file_io import Place
    from stages.weights.assembly import Assembly
    from stages.weights.stage_store import StageStore

log = structlog.get_logger()

# So many pieces that look right and have another hash, and more than are right: a file of another model.
_MOST_STRANGE_PIECES: Final = 2
# Between two looks at whether the file that is copied from is still what it was.
_BATCH_PIECES: Final = 64


@dataclass(frozen=True)
class KnownFile:
    """A file of the model on this very host.

    Attributes:
        path: Where.
        stamp: What it looked like when it was hashed.
    """

    path: Path
    stamp: FileStamp


def take_from_model(
    assembly: Assembly, files: tuple[KnownFile, ...], on_bytes: Callable[[int], None]
) -> None:
    """Copy what is missing out of the model that was hashed on this host, as long as it is unchanged.

    Args:
        assembly: Gets the pieces.
        files: Of the model, in its order; none if it is on another host.
        on_bytes: Called with the number of bytes just copied; may raise.

    Raises:
        OSError: If the assembly cannot be written.
    """
    for number, file in enumerate(files):
        here = {
            index: (assembly.recipe.pieces[index].region, assembly.recipe.pieces[index].tensor_offset)
            for index in assembly.missing
            if assembly.recipe.pieces[index].region.file == number
        }
        _copy_trusted(assembly, file.path, file.stamp, here, on_bytes)


def take_from_store(assembly: Assembly, store: StageStore, on_bytes: Callable[[int], None]) -> None:
    """Copy what is missing out of other stages in the cache, whose pieces were checked when they came.

    Raises:
        OSError: If the assembly cannot be written.
    """
    pieces = assembly.recipe.pieces
    for path, recipe in store.donors({pieces[index].sha256 for index in assembly.missing}):
        at = {piece.sha256: piece.at for piece in recipe.pieces}
        everything = Region(0, 0, recipe.size_bytes)
        here = {
            index: (everything, at[pieces[index].sha256])
            for index in assembly.missing
            if pieces[index].sha256 in at
        }
        try:
            stamp = FileStamp.of(path)
        except ModelError:
            continue
        _copy_trusted(assembly, path, stamp, here, on_bytes)


def take_from_folder(assembly: Assembly, folder: Path, on_bytes: Callable[[int], None]) -> None:
    """Copy what is missing out of the GGUF files of a folder, and believe each piece by its hash.

    Tensors are found by name and size, but for those of which a stage holds only parts of rows. A file where
    they have other bytes is of another model.

    Raises:
        OSError: If the assembly cannot be written.
    """
    # Whoever has no such folder does without what reads GGUFs.
    from stages.gguf.reader import read_one_header  # noqa: PLC0415

    for path in sorted(folder.rglob("*.gguf")):
        if not assembly.missing:
            return
        try:
            header = read_one_header(path)
            descriptor = os.open(path, os.O_RDONLY)
        except (ModelError, OSError) as error:
            log.debug("own_copy_passed_over", path=str(path), reason=str(error))
            continue
        try:
            places = {
                (tensor.name, tensor.n_bytes): tensor.offset_bytes for tensor in header.tensors.values()
            }
            num_taken = _copy_by_hash(assembly, descriptor, places, on_bytes)
        except UnreadableError as error:
            log.warning("own_copy_passed_over", path=str(path), reason=str(error.__cause__))
            continue
        finally:
            os.close(descriptor)
        if num_taken:
            log.info("pieces_from_own_model", path=str(path), pieces=num_taken)


def _copy_trusted(
    assembly: Assembly,
    path: Path,
    stamp: FileStamp,
    places: Mapping[int, Place],
    on_bytes: Callable[[int], None],
) -> None:
    """Copy pieces, by index and place, without hashing them, as long as the file stays the same."""
    if not places:
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        log.warning("own_copy_unreadable", path=str(path), reason=str(error))
        return
    try:
        for batch in _batches(places):
            copied = [
                index for index in batch if _copy_piece(assembly, index, descriptor, places[index], on_bytes)
            ]
            if FileStamp.of(path) != stamp:
                raise InvalidModel(f"{path} is not what it was when it was hashed")
            for index in copied:
                assembly.claim(index)
    except (ModelError, UnreadableError) as error:
        log.warning("own_copy_passed_over", path=str(path), reason=str(error.__cause__ or error))
    finally:
        os.close(descriptor)


def _copy_piece(
    assembly: Assembly, index: int, descriptor: int, place: Place, on_bytes: Callable[[int], None]
) -> bool:
    """Copy one piece, unchecked; tells whether all of it was there."""
    piece = assembly.recipe.pieces[index]
    copied = copy_region(descriptor, place, assembly.descriptor, piece.at, piece.num_bytes, on_bytes=on_bytes)
    return copied == piece.num_bytes


def _batches(places: Mapping[int, Place]) -> Iterator[list[int]]:
    indices = sorted(places)
    for start in range(0, len(indices), _BATCH_PIECES):
        yield indices[start : start + _BATCH_PIECES]


def _copy_by_hash(
    assembly: Assembly,
    descriptor: int,
    places: Mapping[tuple[str, int], int],
    on_bytes: Callable[[int], None],
) -> int:
    num_taken = num_strange = 0
    for index in assembly.missing:
        piece = assembly.recipe.pieces[index]
        offset = places.get((piece.tensor, piece.tensor_bytes))
        if offset is None:
            continue
        place = Region(0, offset, piece.tensor_bytes), piece.tensor_offset
        if _copy_piece(assembly, index, descriptor, place, on_bytes) and assembly.check(index):
            num_taken += 1
        else:
            num_strange += 1
            if num_strange > max(_MOST_STRANGE_PIECES, num_taken):
                break
    return num_taken
