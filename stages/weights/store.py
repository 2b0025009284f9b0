"""Store of stage files by recipe hash: locks, eviction by size and age, settings."""

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
from stages.gguf.file_io import atomic_write, write_atomically, write_error
from stages.units import format_size
from stages.weights.assembly import note_path, wrong_pieces
from stages.weights.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


log = structlog.get_logger()


def make_room(
    store: StageStore, needed_bytes: int, limit_bytes: int | None, *, keep: Collection[str] = ()
) -> int:
    """Remove stages until what is left, and what is to come, keeps to the limit.

    Stages that are loaded, or on their way in, stay; where the limit is too small for them it is exceeded.

    Args:
        store: Whose.
        needed_bytes: What is to come.
        limit_bytes: None limits nothing.
        keep: Names of stages that are to stay.

    Returns:
        The bytes that were freed.

    Raises:
        ModelError: If what is to come is more than the limit by itself.
    """
    if limit_bytes is None:
        return 0
    if needed_bytes > limit_bytes:
        raise ModelError(
            f"a stage of {format_size(needed_bytes)} is larger than the whole cache may be, "
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


# `mesh join` and `mesh serve` set the variables for the processes that they start.
MODELS: Final = "SPANMESH_MODELS"
CACHE_BYTES: Final = "SPANMESH_CACHE_BYTES"


@dataclass(frozen=True)
class StorageOptions:
    """How weights are kept.

    Attributes:
        models: A folder with GGUF files of this host's own, if there is one.
        cache_bytes: What stage files may take of the disk together, if that is limited.
    """

    models: Path | None = None
    cache_bytes: int | None = None

    def to_environment(self) -> None:
        """Let the processes that this one starts know."""
        for name, value in ((MODELS, self.models), (CACHE_BYTES, self.cache_bytes)):
            if value is not None:
                os.environ[name] = str(value)


DEFAULT_STORAGE: Final = StorageOptions()


def read_storage_options() -> StorageOptions:
    """What whoever started this process said."""
    models, cache_bytes = os.environ.get(MODELS), os.environ.get(CACHE_BYTES)
    return StorageOptions(Path(models) if models else None, int(cache_bytes) if cache_bytes else None)


@dataclass(frozen=True)
class Stamp:
    """A file's content, and what the file looked like when that was found out."""

    sha256: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path, sha256: str) -> Stamp:
        """The stamp of a file as it is now."""
        status = path.stat()
        return cls(sha256, status.st_size, status.st_mtime_ns)

    def fits(self, path: Path) -> bool:
        """Whether the file looks as it did; one that is gone does not."""
        try:
            return self == Stamp.of(path, self.sha256)
        except OSError:
            return False

    def save(self, path: Path) -> None:
        """Write the stamp to a small file of its own."""
        write_atomically(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Stamp | None:
        """A saved stamp; None if there is none, or none that can be understood."""
        try:
            saved = json.loads(path.read_text())
            return cls(str(saved["sha256"]), int(saved["size_bytes"]), int(saved["mtime_ns"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredStage:
    """A stage file in the store, or what there is of one.

    Attributes:
        sha256: Its name.
        path: The file.
        size_bytes: What it takes of the disk.
        used_at_s: When it was last loaded, Unix time.
        is_whole: Whether all of it is there.
    """

    sha256: str
    path: Path
    size_bytes: int
    used_at_s: float
    is_whole: bool


class StageStore:
    """A folder of stage files that were whole when they came in.

    ::

        <sha256>.gguf     a stage file; <sha256>.json its stamp
        <sha256>.recipe   what must be in it
        <sha256>.partial  one on its way in; <sha256>.pieces tells which of its pieces are there

    A file that no longer fits its stamp is read again. Pieces of it that are wrong are fetched anew, the
    others are not.

    Args:
        root: The folder; made when needed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, sha256: str) -> Path | None:
        """The stage file of this name, or None. One with wrong pieces becomes one on its way in.

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
                os.utime(stamp_path)  # when it was last used
            return path
        recipe = self.recipe(sha256)
        try:
            wrong = None if recipe is None else wrong_pieces(recipe, path)
        except FileNotFoundError:
            return None  # removed since, to make room
        except OSError as error:
            raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
        if wrong == []:
            # What was read may not have reached the disk yet.
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
        """The recipe of this name, if it is here.

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
        """Keep a recipe.

        Raises:
            ModelError: If it cannot be written.
        """
        path = self._path(recipe.sha256, ".recipe")
        if not path.exists():
            self._make_root()
            with atomic_write(path) as file:
                file.write(recipe.to_bytes())

    def partial(self, sha256: str) -> Path:
        """Where to gather this stage until it is whole; what lies there may be continued.

        Raises:
            ModelError: If `sha256` is not one, or the folder cannot be made.
        """
        partial = self._path(sha256, ".partial")
        self._make_root()
        return partial

    def fresh(self) -> Path:
        """A name of its own for a file that is written here; its recipe decides its name later."""
        self._make_root()
        return self.root / f"{secrets.token_hex(8)}.fresh"

    def adopt(self, path: Path, recipe: Recipe) -> Path:
        """Take in a file each piece of which was checked.

        It is read again when it is next looked for, unless `settle` was called before.

        Returns:
            Its path from now on.
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
        """Note that a file is whole, once the disk has all of it: a power cut must not leave holes unnoticed.

        Raises:
            ModelError: If the disk fails.
        """
        path = self._path(sha256, ".gguf")
        try:
            stamp = Stamp.of(path, sha256)
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise write_error(path, error) from error
        stamp.save(self._path(sha256, ".json"))

    def stages(self) -> Iterator[StoredStage]:
        """Everything that is here, whole or not; files called otherwise are none of ours."""
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
        """Whole stages that hold some of these pieces, and what is where in them."""
        for path in self.root.glob("*.gguf"):
            stamp = Stamp.load(path.with_suffix(".json"))
            if stamp is None or not _SHA256.fullmatch(path.stem) or not stamp.fits(path):
                continue
            recipe = self.recipe(path.stem)
            if recipe is not None and any(piece.sha256 in wanted for piece in recipe.pieces):
                yield path, recipe

    def remove(self, stage: StoredStage) -> bool:
        """Remove a stage unless somebody has it loaded, or is fetching it; tells whether."""
        try:
            descriptor = os.open(stage.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            suffixes = (".json", ".gguf") if stage.is_whole else (".pieces", ".partial")
            for suffix in suffixes:
                self._path(stage.sha256, suffix).unlink(missing_ok=True)
            if not any(self._path(stage.sha256, suffix).exists() for suffix in (".gguf", ".partial")):
                self._path(stage.sha256, ".recipe").unlink(missing_ok=True)
            return True
        finally:
            os.close(descriptor)

    def remove_leftovers(self, *, before_s: float) -> int:
        """Remove what killed processes began before some Unix time; gives the bytes that were freed."""
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
        # The name may come from a peer: nothing but a hash may become part of a path.
        if not _SHA256.fullmatch(sha256):
            raise ModelError(f"{sha256!r} is not a sha256 in lower-case hex")
        return self.root / f"{sha256}{suffix}"


def hold(path: Path) -> int:
    """Keep a stage file from being removed, until the descriptor that this returns is closed.

    Raises:
        InvalidModel: If it is not there any more.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
    return descriptor


def default_root() -> Path:
    """`$XDG_CACHE_HOME/spanmesh`, or `~/.cache/spanmesh`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spanmesh"


def stage_store(root: Path | None = None) -> StageStore:
    """The stage files themselves, cut here or fetched; all that a host needs that cuts nothing.

    Args:
        root: The cache's folder, `default_root` unless given.
    """
    return StageStore((root if root is not None else default_root()) / "stages")
