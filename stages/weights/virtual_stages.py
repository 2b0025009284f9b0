"""Stage cache: recipes, hashes and virtual stage files of the models on this host."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from spanmesh_proto.errors import InvalidModel, ModelError
from stages.files import ModelFile, require_disk, unreadable, write_atomically
from stages.gguf import read_header
from stages.layers import LayerRange, cuts_of
from stages.slicing.layout import FORMAT_VERSION, lay_out, lay_out_whole
from stages.slicing.source_model import count_layers, read_source
from stages.slicing.stage_writer import (
    ByteCounter,
    encode_header,
    stage_bytes,
    with_shared_blocks,
    write_stage,
)
from stages.weights.disk_cache import default_root, stage_store
from stages.weights.hashing import ModelHashes, region_sha256, stamps_of
from stages.weights.piece_sources import KnownFile
from stages.weights.recipe import Recipe, RecipeTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from stages.files import Region
    from stages.gguf import GgufHeader
    from stages.slicing.layout import StageLayout
    from stages.slicing.source_model import SourceModel
    from stages.weights.hashing import FileStamp

log = structlog.get_logger()


class VirtualStage:
    """Reads like the stage file of a recipe, without that file. Thread-safe.

    Files that were touched, copied or put back have other stamps than when they were hashed. Each of their
    pieces is hashed again before it is read.

    Args:
        recipe: The recipe.
        paths: Files of the model.
        stamps: Their stamps when they were hashed.

    Raises:
        InvalidModel: If they have another size than then, or cannot be read.
    """

    def __init__(self, recipe: Recipe, paths: Sequence[Path], stamps: Sequence[FileStamp]) -> None:
        self._paths = paths
        found = stamps_of(paths)
        if [stamp.size_bytes for stamp in found] != [stamp.size_bytes for stamp in stamps]:
            raise self._changed()
        self._is_trusted = found == tuple(stamps)
        self._checked: set[int] = set()
        self.size_bytes = recipe.size_bytes
        self._header = recipe.header
        self._pieces = recipe.pieces
        self._starts = [piece.at for piece in recipe.pieces]
        self._files = ModelFile(*paths)

    def close(self) -> None:
        """Close the model's files."""
        self._files.close()

    def read(self, at: int, count: int) -> bytes:
        """Up to `count` bytes from `at` on, empty at the end; fewer at the end of a piece.

        Raises:
            InvalidModel: If the model cannot be read, has become shorter, or has other bytes than before.
        """
        count = min(count, self.size_bytes - at)
        if count <= 0:
            return b""
        if at < len(self._header):
            return self._header[at : at + count]
        index = bisect_right(self._starts, at) - 1
        if index >= 0 and at < self._pieces[index].at + self._pieces[index].num_bytes:
            piece = self._pieces[index]
            self._check(index)
            offset = at - piece.at
            file = piece.region.file
            data = piece.region.read(
                lambda start, length: self._files.read_at(start, length, file),
                piece.tensor_offset + offset,
                min(count, piece.num_bytes - offset),
            )
            if not data:
                raise InvalidModel(f"{self._files.paths[file]} was truncated; fetch it again")
            return data
        following = self._starts[index + 1] if index + 1 < len(self._starts) else self.size_bytes
        return bytes(min(count, following - at))

    def _check(self, index: int) -> None:
        if self._is_trusted or index in self._checked:
            return
        piece = self._pieces[index]
        file = piece.region.file
        try:
            found = region_sha256(
                self._files.descriptor(file), piece.region, piece.tensor_offset, piece.num_bytes
            )
        except OSError as error:
            raise unreadable(self._paths[file], error) from error
        if found != piece.sha256:
            raise self._changed()
        self._checked.add(index)

    def _changed(self) -> InvalidModel:
        return InvalidModel(
            f"{self._paths[0]} was changed since its layers were hashed; start `mesh serve` again, or put "
            "the old file back"
        )


@dataclass(frozen=True)
class StageFile:
    """A stage file in the cache."""

    path: Path
    """The stage file."""
    sha256: str
    """Hash of its recipe, hex."""
    size_bytes: int
    """Size of the file."""
    layers: LayerRange
    """Its layers."""
    n_layers: int
    """Layers of the whole model."""


@dataclass(frozen=True)
class _Known:
    """A model that was read."""

    model: SourceModel
    """The model from its header."""
    stamps: tuple[FileStamp, ...]
    """Stamps of its files at that time."""
    hashes: ModelHashes
    """Hashes of its tensors."""


class StageCache:
    """Recipes of the stages of this host's models, and stage files.

    ::

        stages/               stage files, see `StageStore`
        sources/<key>.json    hashes of a model's tensors, so that each is read once
        checked/<key>         cuts of models of families not in the table that passed the self-check

    Thread-safe.

    Args:
        root: Folder of the cache, `default_root` unless given.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root if root is not None else default_root()
        self.store = stage_store(self._root)
        self._known: dict[Path, _Known] = {}
        self._described: dict[str, tuple[Recipe, tuple[Path, ...], tuple[FileStamp, ...]]] = {}

    def find(self, sha256: str) -> Path | None:
        """The stage file of this name, or None; see `StageStore.find`."""
        return self.store.find(sha256)

    def describe(
        self, source: Path, layers: LayerRange, *, progress: Callable[[int, int], None] | None = None
    ) -> Recipe:
        """Recipe of the stage file of some layers of a model. Only hashes are written.

        Args:
            source: The whole model, a GGUF file, the first if it has several.
            layers: The layers.
            progress: Called with bytes hashed and bytes in all.

        Raises:
            InvalidModel: If the source is no GGUF, truncated, lacks a tensor, or changes meanwhile.
            UncuttableModel: If it has no such layers, or cannot be cut exactly there.
            ModelError: If the cache cannot be written.
        """
        known = self._read(source)
        known.model.check_range(layers)
        self._check_once(known.model, layers)
        layout = with_shared_blocks(lay_out(known.model, layers))
        regions = _regions(layout)
        counter = ByteCounter(known.hashes.missing_bytes(regions), progress)
        return self._described_now(known, layers, layout, known.hashes.of(regions, counter.add))

    def describe_whole(
        self,
        source: Path,
        *,
        n_layers: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Recipe:
        """Recipe of one file with all of a model, of any kind, vocabulary included. Only hashes are written.

        Args:
            source: The model, a GGUF file, the first if it has several.
            n_layers: Its layers, if its metadata name them otherwise than those of models do.
            progress: Called with bytes hashed and bytes in all.

        Raises:
            InvalidModel: If the source is no GGUF, truncated, or changes meanwhile.
            ModelError: If the cache cannot be written.
        """
        header = read_header(source)
        stamps, hashes = stamps_of(header.paths), ModelHashes(header.paths, self._index_of(source.resolve()))
        layout = with_shared_blocks(lay_out_whole(header))
        regions = _regions(layout)
        counter = ByteCounter(hashes.missing_bytes(regions), progress)
        tensors = _recipe_tensors(layout, _names_by_place(header), hashes.of(regions, counter.add))
        recipe = _whole_recipe(header, layout, tensors, n_layers or count_layers(header))
        self._described[recipe.sha256] = recipe, header.paths, stamps
        return recipe

    def describe_hollow(self, source: Path) -> Recipe:
        """Recipe of one file with the metadata of a model and the directory of its tensors, without weights.

        The file is as large as the model and takes the disk space of its header: the weights are a hole. It
        serves what reads the vocabulary and sizes of a model alone.

        Args:
            source: The model, a GGUF file, the first if it has several.

        Raises:
            InvalidModel: If the source is no GGUF, truncated, or changes meanwhile.
        """
        header = read_header(source)
        stamps, layout = stamps_of(header.paths), lay_out_whole(header)
        tensors = [RecipeTensor(tensor.n_bytes) for tensor in layout.tensors]
        recipe = _whole_recipe(header, layout, tensors, count_layers(header))
        self._described[recipe.sha256] = recipe, header.paths, stamps
        return recipe

    def recipe(self, sha256: str) -> Recipe | None:
        """A recipe that was made or received here; None if there is none."""
        described = self._described.get(sha256)
        return described[0] if described is not None else self.store.recipe(sha256)

    def open(self, sha256: str) -> VirtualStage | None:
        """Open a stage with a recipe, with or without its file; None without a recipe.

        Raises:
            InvalidModel: If the model has another size now, or cannot be read; see `VirtualStage`.
        """
        described = self._described.get(sha256)
        if described is None:
            return None
        return VirtualStage(*described)

    def known_files(self, sha256: str) -> tuple[KnownFile, ...]:
        """Files of a model on this host, with their stamps when a stage of it was described.

        Args:
            sha256: Hash of the stage's recipe, hex.

        Returns:
            The files in the recipe's order; empty if the stage was not described here.
        """
        described = self._described.get(sha256)
        if described is None:
            return ()
        _recipe, paths, stamps = described
        return tuple(map(KnownFile, paths, stamps))

    def cut(
        self, source: Path, layers: LayerRange, *, progress: Callable[[int, int], None] | None = None
    ) -> StageFile:
        """Stage file of some layers of a model, written once.

        Args:
            source: The whole model, a GGUF file, the first if it has several.
            layers: The layers.
            progress: Called with bytes done, hashed and written, and bytes in all.

        Raises:
            InvalidModel: If the source is no GGUF, truncated, lacks a tensor, or changes meanwhile.
            UncuttableModel: If it has no such layers, or cannot be cut exactly there.
            ModelError: If the cache cannot be written, or its disk has no room.
        """
        known = self._read(source)
        known.model.check_range(layers)
        self._check_once(known.model, layers)
        layout = with_shared_blocks(lay_out(known.model, layers))
        regions = _regions(layout)
        size_bytes = stage_bytes(layout)
        counter = ByteCounter(known.hashes.missing_bytes(regions) + size_bytes, progress)
        recipe = self._described_now(known, layers, layout, known.hashes.of(regions, counter.add))
        path = self._find(recipe.sha256)
        if path is None:
            path = self._cut(known, recipe, counter)
        else:
            counter.add(size_bytes)
        return StageFile(path, recipe.sha256, recipe.size_bytes, layers, recipe.n_layers)

    def _cut(self, known: _Known, recipe: Recipe, counter: ByteCounter) -> Path:
        fresh = self.store.fresh()
        try:
            require_disk(fresh, recipe.weight_bytes)
            write_stage(known.model, recipe.layers, fresh, counter.add)
            if stamps_of(known.model.header.paths) != known.stamps:
                raise ModelError(f"{known.model.header.path} was changed while it was being cut; try again")
            path = self.store.adopt(fresh, recipe)
            self.store.settle(recipe.sha256)
        finally:
            fresh.unlink(missing_ok=True)
        log.info("stage_cut", model=recipe.model, layers=str(recipe.layers), sha256=recipe.sha256)
        return path

    def _described_now(
        self,
        known: _Known,
        layers: LayerRange,
        layout: StageLayout,
        hashes: dict[Region, tuple[str, ...]],
    ) -> Recipe:
        header = known.model.header
        recipe = Recipe(
            header.text("general.name", header.path.stem),
            layers,
            known.model.n_layers,
            layout.alignment,
            encode_header(layout),
            tuple(_recipe_tensors(layout, _names_by_place(header), hashes)),
        )
        self._described[recipe.sha256] = recipe, header.paths, known.stamps
        return recipe

    def _read(self, source: Path) -> _Known:
        key = source.resolve()
        known = self._known.get(key)
        if known is None or stamps_of(known.model.header.paths) != known.stamps:
            model = read_source(source)
            paths = model.header.paths
            known = _Known(model, stamps_of(paths), ModelHashes(paths, self._index_of(key)))
            self._known[key] = known
        return known

    def _index_of(self, source: Path) -> Path:
        """File with the hashes of a model, which is named by its whole path."""
        return self._root / "sources" / f"{hashlib.sha256(os.fsencode(source)).hexdigest()}.json"

    def _find(self, sha256: str) -> Path | None:
        try:
            return self.store.find(sha256)
        except ModelError:
            return None

    def _check_once(self, model: SourceModel, layers: LayerRange) -> None:
        if model.is_known:
            return
        structure = _structure_sha256(model)
        names = (f"{structure}-{cut}-v{FORMAT_VERSION}" for cut in cuts_of(layers, model.n_layers))
        passed = [self._root / "checked" / name for name in names]
        if not all(path.exists() for path in passed):
            # Only a family without rules of its own needs llama.cpp here.
            from stages.certification.certify import require_exact_cut  # noqa: PLC0415

            require_exact_cut(model, layers)
            for path in passed:
                write_atomically(path, f"{layers}")


def _structure_sha256(model: SourceModel) -> str:
    """Hash of the model's metadata and tensor directory, without weights and vocabulary."""
    digest = hashlib.sha256()
    for key, value in model.header.metadata.items():
        if not key.startswith("tokenizer."):
            digest.update(f"{key} {value.type} {value.count} ".encode() + value.payload)
    for tensor in model.header.tensors.values():
        digest.update(f"{tensor.name} {tensor.shape} {tensor.type} {tensor.n_bytes};".encode())
    return digest.hexdigest()


def _whole_recipe(
    header: GgufHeader, layout: StageLayout, tensors: Sequence[RecipeTensor], n_layers: int
) -> Recipe:
    return Recipe(
        header.text("general.name", header.path.stem),
        LayerRange(0, n_layers),
        n_layers,
        layout.alignment,
        encode_header(layout),
        tuple(tensors),
    )


def _names_by_place(header: GgufHeader) -> dict[tuple[int, int], str]:
    """Names of a model's tensors, by their file and their first byte in it."""
    return {(tensor.file, tensor.offset_bytes): tensor.name for tensor in header.tensors.values()}


def _regions(layout: StageLayout) -> Sequence[Region]:
    return [tensor.source for tensor in layout.tensors if tensor.source is not None]


def _recipe_tensors(
    layout: StageLayout, names: dict[tuple[int, int], str], hashes: dict[Region, tuple[str, ...]]
) -> list[RecipeTensor]:
    tensors = []
    for tensor in layout.tensors:
        if tensor.source is None:
            tensors.append(RecipeTensor(tensor.n_bytes))
            continue
        name = names.get(tensor.source[:2], tensor.name)
        tensors.append(RecipeTensor(tensor.n_bytes, name, tensor.source, hashes[tensor.source]))
    return tensors
