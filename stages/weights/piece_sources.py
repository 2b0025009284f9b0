"""Sources of pieces: other local files, and a hub."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto.errors import InvalidModel, ModelError
from stages.files import Region, UnreadableError, copy_region
from stages.weights.assembly import SentPieces
from stages.weights.hashing import FileStamp
from stages.weights.http_download import read_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from stages.files import Place
    from stages.weights.assembly import Assembly
    from stages.weights.disk_cache import StageStore

# This many pieces with the right size and a wrong hash, and more than right ones: a file of another model.
_MOST_STRANGE_PIECES: Final = 2
# Interval, in pieces, of the checks that the source file is unchanged.
_BATCH_PIECES: Final = 64
_NUM_CONNECTIONS: Final = 4
# Bytes of one request: enough to hide its round trip, few enough that all connections are busy to the end.
_MOST_BYTES: Final = 64 * 1024 * 1024

log = structlog.get_logger()


@dataclass(frozen=True)
class KnownFile:
    """A file of the model on this host."""

    path: Path
    """Where."""
    stamp: FileStamp
    """Its stamp when it was hashed."""


@dataclass(frozen=True)
class HubFile:
    """A file of a model at a hub."""

    url: str
    """URL, at a revision that does not change."""
    size_bytes: int
    """Its size."""


def take_from_model(
    assembly: Assembly, files: tuple[KnownFile, ...], on_bytes: Callable[[int], None]
) -> None:
    """Copy missing pieces from the model that was hashed on this host, while it is unchanged.

    Args:
        assembly: The assembly.
        files: Files of the model, in order; empty if it is on another host.
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
    """Copy missing pieces from other stages in the cache, whose pieces were checked.

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
    """Copy missing pieces from the GGUF files of a folder, checked by their hashes.

    Tensors are found by name and size, except those of which a stage holds parts of rows only. A file with
    other bytes there is of another model.

    Raises:
        OSError: If the assembly cannot be written.
    """
    # Hosts without such a folder do not import the GGUF reader.
    from stages.gguf import read_one_header  # noqa: PLC0415

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
    """Copy pieces, by index and place, without hashing them, while the file is unchanged."""
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
                raise InvalidModel(f"{path} has changed since it was hashed")
            for index in copied:
                assembly.claim(index)
    except (ModelError, UnreadableError) as error:
        log.warning("own_copy_passed_over", path=str(path), reason=str(error.__cause__ or error))
    finally:
        os.close(descriptor)


def _copy_piece(
    assembly: Assembly, index: int, descriptor: int, place: Place, on_bytes: Callable[[int], None]
) -> bool:
    """Copy one piece, unchecked; returns whether all of it was there."""
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


def fetch_from_hub(
    assembly: Assembly, files: Sequence[HubFile], on_bytes: Callable[[int], None]
) -> list[int]:
    """Fetch missing pieces that are contiguous there; others would take a request for each row.

    Args:
        assembly: The assembly.
        files: Files of the model, in the recipe's order.
        on_bytes: Called with the number of bytes that just came, from several threads; may raise.

    Returns:
        Indices of the pieces with a wrong hash.

    Raises:
        HubUnavailable: If the hub refuses or does not answer.
        OSError: If the assembly cannot be written.
    """

    def fetch(indices: list[int]) -> list[int]:
        pieces = [assembly.recipe.pieces[index] for index in indices]
        sent = SentPieces(assembly, indices)

        def take(data: bytes) -> None:
            sent.take(data)
            on_bytes(len(data))

        num_bytes = sum(piece.num_bytes for piece in pieces)
        read_range(files[pieces[0].region.file].url, pieces[0].file_offset, num_bytes, take)
        return sent.wrong

    pool = ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix="hub")
    try:
        tasks = [pool.submit(fetch, stretch) for stretch in _stretches(assembly)]
        return [index for task in tasks for index in task.result()]
    finally:
        pool.shutdown(cancel_futures=True)


def has_hub_pieces(assembly: Assembly) -> bool:
    """Whether `fetch_from_hub` would fetch anything."""
    return bool(_wanted(assembly))


def _wanted(assembly: Assembly) -> list[int]:
    pieces = assembly.recipe.pieces
    return [index for index in assembly.missing if pieces[index].region.is_whole]


def _stretches(assembly: Assembly) -> Iterator[list[int]]:
    """Missing pieces that are adjacent in one file of the model."""
    pieces = assembly.recipe.pieces
    stretch: list[int] = []
    num_bytes = 0
    for index in sorted(
        _wanted(assembly), key=lambda each: (pieces[each].region.file, pieces[each].file_offset)
    ):
        piece = pieces[index]
        if stretch:
            last = pieces[stretch[-1]]
            stop = last.file_offset + last.num_bytes
            follows = (last.region.file, stop) == (piece.region.file, piece.file_offset)
            if not follows or num_bytes >= _MOST_BYTES:
                yield stretch
                stretch, num_bytes = [], 0
        stretch.append(index)
        num_bytes += piece.num_bytes
    if stretch:
        yield stretch
