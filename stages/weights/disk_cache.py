"""Stage store: stage files by recipe hash, with locks, eviction by size and age, and settings."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto.errors import InvalidModel, ModelError
from stages.files import atomic_write, sync, try_lock, user_folder, write_atomically, write_error
from stages.units import format_size
from stages.weights.assembly import note_path, wrong_pieces
from stages.weights.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

# `mesh join` and `mesh serve` set the variables for the processes that they start.
MODELS: Final = "SPANMESH_MODELS"
CACHE_BYTES: Final = "SPANMESH_CACHE_BYTES"
KV_DISK_BYTES: Final = "SPANMESH_KV_DISK_BYTES"
_SHA256: Final = re.compile(r"[0-9a-f]{64}")

log = structlog.get_logger()


@dataclass(frozen=True)
class StorageOptions:
    """Storage of this host."""

    models: Path | None = None
    """Folder with GGUF files of this host, if there is one."""
    cache_bytes: int | None = None
    """Limit of all stage files on this disk together, if there is one."""
    kv_disk_bytes: int | None = None
    """Limit of all blocks of KV rows on this disk together; 0 keeps none, None leaves it to the head."""

    def to_environment(self) -> None:
        """Pass the options to child processes."""
        for name, value in (
            (MODELS, self.models),
            (CACHE_BYTES, self.cache_bytes),
            (KV_DISK_BYTES, self.kv_disk_bytes),
        ):
            if value is not None:
                os.environ[name] = str(value)


DEFAULT_STORAGE: Final = StorageOptions()


@dataclass(frozen=True)
class Stamp:
    """Hash of a file's content, with the file's stamp at that time."""

    sha256: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path, sha256: str) -> Stamp:
        """Current stamp of a file."""
        status = path.stat()
        return cls(sha256, status.st_size, status.st_mtime_ns)

    def fits(self, path: Path) -> bool:
        """Whether the file is unchanged; False if it is gone."""
        try:
            return self == Stamp.of(path, self.sha256)
        except OSError:
            return False

    def save(self, path: Path) -> None:
        """Write the stamp to a small file of its own."""
        write_atomically(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Stamp | None:
        """A saved stamp; None if there is none, or it is malformed."""
        try:
            saved = json.loads(path.read_text())
            return cls(str(saved["sha256"]), int(saved["size_bytes"]), int(saved["mtime_ns"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class StoredStage:
    """A stage file in the store, complete or not."""

    sha256: str
    """Its name."""
    path: Path
    """The file."""
    size_bytes: int
    """Size on disk."""
    used_at_s: float
    """When it was last loaded, Unix seconds."""
    is_whole: bool
    """Whether it is complete."""


class StageStore:
    """Folder of stage files.

    ::

        <sha256>.gguf     a stage file; <sha256>.json its stamp
        <sha256>.recipe   what must be in it
        <sha256>.partial  one on its way in; <sha256>.pieces tells which of its pieces are there

    A file that does not fit its stamp is read again. Wrong pieces of it are fetched again, no others.

    Args:
        root: The folder; created when needed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, sha256: str) -> Path | None:
        """The stage file of this name, or None. One with wrong pieces becomes incomplete.

        Raises:
            ModelError: If `sha256` is not one.
        """
        path = self._path(sha256, ".gguf")
        stamp_path = self._path(sha256, ".json")
        if not path.is_file():
            return None
        stamp = Stamp.load(stamp_path)
        if stamp is not None and stamp.fits(path):
            with suppress(OSError):
                os.utime(stamp_path)  # time of the last use
            return path
        recipe = self.recipe(sha256)
        try:
            wrong = None if recipe is None else wrong_pieces(recipe, path)
        except FileNotFoundError:
            return None  # evicted meanwhile
        except OSError as error:
            raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
        if wrong == []:
            # The file may not be durable yet.
            self.settle(sha256)
            return path
        log.warning("cached_stage_damaged", path=str(path), wrong_pieces=wrong and len(wrong))
        stamp_path.unlink(missing_ok=True)
        if recipe is None or not wrong:
            path.unlink(missing_ok=True)
            return None
        note = bytearray(b"\x01" * len(recipe.pieces))
        for index in wrong:
            note[index] = 0
        partial = self._path(sha256, ".partial")
        note_path(partial).write_bytes(note)
        path.replace(partial)
        return None

    def recipe(self, sha256: str) -> Recipe | None:
        """The recipe of this name, if it is stored.

        Raises:
            ModelError: If `sha256` is not one.
        """
        path = self._path(sha256, ".recipe")
        try:
            return Recipe.from_bytes(path.read_bytes(), sha256)
        except OSError:
            return None
        except InvalidModel:
            path.unlink(missing_ok=True)
            return None

    def keep(self, recipe: Recipe) -> None:
        """Store a recipe.

        Raises:
            ModelError: If it cannot be written.
        """
        path = self._path(recipe.sha256, ".recipe")
        if not path.exists():
            self._make_root()
            with atomic_write(path) as file:
                file.write(recipe.to_bytes())

    def partial(self, sha256: str) -> Path:
        """Path of this stage while it is incomplete; content of an earlier try may be there.

        Raises:
            ModelError: If `sha256` is not one, or the folder cannot be made.
        """
        partial = self._path(sha256, ".partial")
        self._make_root()
        return partial

    def fresh(self) -> Path:
        """A unique path for a file that is written here; its recipe determines its name later."""
        self._make_root()
        return self.root / f"{secrets.token_hex(8)}.fresh"

    def adopt(self, path: Path, recipe: Recipe) -> Path:
        """Move a file whose pieces were checked into the store.

        It is read again at its next use, unless `settle` was called before.

        Returns:
            Its new path.
        """
        self.keep(recipe)
        adopted = self._path(recipe.sha256, ".gguf")
        path.replace(adopted)
        # Of an earlier try, if this one was made elsewhere.
        partial = self._path(recipe.sha256, ".partial")
        note_path(partial).unlink(missing_ok=True)
        partial.unlink(missing_ok=True)
        return adopted

    def settle(self, sha256: str) -> None:
        """Record that a file is complete, once it is durable: after a power cut holes must not go unnoticed.

        Raises:
            ModelError: If the disk fails.
        """
        path = self._path(sha256, ".gguf")
        try:
            stamp = Stamp.of(path, sha256)
            sync(path)
        except OSError as error:
            raise write_error(path, error) from error
        stamp.save(self._path(sha256, ".json"))

    def stages(self) -> Iterator[StoredStage]:
        """All stages, complete or not; other files are ignored."""
        for suffix in (".gguf", ".partial"):
            for path in sorted(self.root.glob(f"*{suffix}")):
                if not _SHA256.fullmatch(path.stem):
                    continue
                stamp = path.with_suffix(".json")
                with suppress(OSError):
                    status = path.stat()
                    used_at_s = stamp.stat().st_mtime if stamp.exists() else status.st_mtime
                    yield StoredStage(
                        path.stem, path, status.st_blocks * 512, used_at_s, is_whole=suffix == ".gguf"
                    )

    def donors(self, wanted: Collection[str]) -> Iterator[tuple[Path, Recipe]]:
        """Complete stages with some of these pieces, and their recipes."""
        for path in self.root.glob("*.gguf"):
            stamp = Stamp.load(path.with_suffix(".json"))
            if stamp is None or not _SHA256.fullmatch(path.stem) or not stamp.fits(path):
                continue
            recipe = self.recipe(path.stem)
            if recipe is not None and any(piece.sha256 in wanted for piece in recipe.pieces):
                yield path, recipe

    def remove(self, stage: StoredStage) -> bool:
        """Remove a stage unless it is loaded or being fetched; returns whether it was removed."""
        try:
            descriptor = os.open(stage.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            if not try_lock(descriptor):
                return False
            suffixes = (".json", ".gguf") if stage.is_whole else (".pieces", ".partial")
            for suffix in suffixes:
                self._path(stage.sha256, suffix).unlink(missing_ok=True)
            if not any(self._path(stage.sha256, suffix).exists() for suffix in (".gguf", ".partial")):
                self._path(stage.sha256, ".recipe").unlink(missing_ok=True)
            return True
        finally:
            os.close(descriptor)

    def remove_leftovers(self, *, before_s: float) -> int:
        """Remove leftovers of killed processes from before a Unix time; returns the freed bytes."""
        freed_bytes = 0
        for path in (*self.root.glob("*.fresh"), *self.root.glob(".*.part")):
            with suppress(OSError):
                status = path.stat()
                if status.st_mtime < before_s:
                    path.unlink()
                    freed_bytes += status.st_blocks * 512
        return freed_bytes

    def _make_root(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"cannot make the folder {self.root}: {error.strerror or error}") from error

    def _path(self, sha256: str, suffix: str) -> Path:
        # The name may come from a peer: only a hash may become part of a path.
        if not _SHA256.fullmatch(sha256):
            raise ModelError(f"{sha256!r} is not a sha256 in lower-case hex")
        return self.root / f"{sha256}{suffix}"


def make_room(
    store: StageStore, needed_bytes: int, limit_bytes: int | None, *, keep: Collection[str] = ()
) -> int:
    """Remove stages until the rest and the new one are within the limit.

    Loaded and incomplete stages are kept, even beyond the limit.

    Args:
        store: The store.
        needed_bytes: Size of the new stage.
        limit_bytes: The limit; None for no limit.
        keep: Names of stages to keep.

    Returns:
        Number of freed bytes.

    Raises:
        ModelError: If the new stage alone exceeds the limit.
    """
    if limit_bytes is None:
        return 0
    if needed_bytes > limit_bytes:
        raise ModelError(
            f"a stage of {format_size(needed_bytes)} exceeds the size limit of the cache, "
            f"{format_size(limit_bytes)}: raise --cache-size",
            param="--cache-size",
        )
    stages = sorted(store.stages(), key=lambda stage: stage.used_at_s)
    total_bytes = sum(stage.size_bytes for stage in stages)
    freed_bytes = 0
    for stage in stages:
        if total_bytes - freed_bytes + needed_bytes <= limit_bytes:
            break
        if stage.sha256 not in keep and store.remove(stage):
            freed_bytes += stage.size_bytes
            log.info("cached_stage_removed", sha256=stage.sha256[:12], size_bytes=stage.size_bytes)
    if total_bytes - freed_bytes + needed_bytes > limit_bytes:
        log.warning(
            "cache_over_limit", bytes=total_bytes - freed_bytes + needed_bytes, limit_bytes=limit_bytes
        )
    return freed_bytes


def read_storage_options() -> StorageOptions:
    """Options of the parent process."""
    models, cache_bytes, kv_disk_bytes = map(os.environ.get, (MODELS, CACHE_BYTES, KV_DISK_BYTES))
    return StorageOptions(
        Path(models) if models else None,
        int(cache_bytes) if cache_bytes else None,
        int(kv_disk_bytes) if kv_disk_bytes else None,
    )


def hold(path: Path) -> int:
    """Protect a stage file from removal, until the returned descriptor is closed.

    Raises:
        InvalidModel: If it is gone.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
    return descriptor


def default_root() -> Path:
    """`$XDG_CACHE_HOME/spanmesh`, or `~/.cache/spanmesh`."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "spanmesh"


def stage_store(root: Path | None = None) -> StageStore:
    """Store of stage files, for hosts that cut nothing.

    Args:
        root: Folder of the cache, `default_root` unless given.
    """
    return StageStore((root if root is not None else default_root()) / "stages")
