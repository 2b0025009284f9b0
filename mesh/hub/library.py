"""Models of the hub on this host.

::

    models/<org>/<repo>/<commit>/…   the files, as they are called at the hub
    models/<org>/<repo>/known.json   what was asked for, and which commit and files that was
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.hub.choice import RepoFile, choose
from mesh.hub.repository import Repository, read_repository
from spanmesh_proto.errors import HubUnavailable
from stages.gguf.file_io import write_atomically
from stages.gguf.reader import model_name, part_paths
from stages.weights.http import download
from stages.weights.sources import HubFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mesh.hub.reference import HubReference

log = structlog.get_logger()

_KNOWN: Final = "known.json"


@dataclass(frozen=True)
class PulledModel:
    """A model of the hub that is here.

    Attributes:
        path: Its first file.
        hub: All its files at the hub.
    """

    path: Path
    hub: tuple[HubFile, ...]


@dataclass(frozen=True)
class KeptModel:
    """What is on the disk of one model.

    Attributes:
        name: `hf:org/repo@COMMIT:NAME`, the commit by its beginning.
        folder: Of its commit.
        paths: Its files.
        size_bytes: What they take.
        used_at_s: When it was last pulled or served, Unix time.
        is_whole: Whether all of it is there.
    """

    name: str
    folder: Path
    paths: tuple[Path, ...]
    size_bytes: int
    used_at_s: float
    is_whole: bool


class HubLibrary:
    """Models of the hub in this host's cache.

    Args:
        root: The cache's folder.
        read: Asks the hub what a repository holds.
    """

    def __init__(self, root: Path, *, read: Callable[[HubReference], Repository] = read_repository) -> None:
        self._root = root / "models"
        self._read = read

    def pull(
        self, reference: HubReference, progress: Callable[[str], Callable[[int, int], None]]
    ) -> PulledModel:
        """Bring a model here, all but what is here already.

        A hub that does not answer does no harm if the model was pulled before.

        Args:
            reference: Which model.
            progress: Called with what goes on; what it gives is called with bytes done and bytes in all.

        Raises:
            HubUnavailable: If the hub refuses, lacks the model, or does not answer.
            ModelError: If the disk has no room for it.
            ClusterError: If the extra that talks to the hub is not installed.
        """
        try:
            repository = self._read(reference)
            files = choose(reference, repository.files)
        except HubUnavailable as error:
            known = self._known(reference)
            if known is None:
                raise
            log.warning("hub_not_asked", model=str(reference), reason=error.message)
            repository, files = known
        paths = [self._path(repository, file) for file in files]
        for file, path in zip(files, paths, strict=True):
            if path.is_file() and path.stat().st_size == file.size_bytes:
                continue
            _download(repository.url(file), file, path, progress)
        (self._root / repository.repo / repository.commit).touch()  # when it was last used
        self._note(reference, repository, files)
        hub = tuple(HubFile(repository.url(file), file.size_bytes) for file in files)
        return PulledModel(paths[0], hub)

    def models(self) -> Iterator[KeptModel]:
        """Every model that is here, or begun."""
        for folder in sorted(path for path in self._root.glob("*/*/*") if path.is_dir()):
            repo = "/".join(folder.relative_to(self._root).parts[:2])
            by_name: dict[str, list[Path]] = {}
            for path in sorted(folder.rglob("*.gguf*")):
                if path.suffix in {".gguf", ".partial"}:
                    by_name.setdefault(model_name(_whole(path)), []).append(path)
            for name, paths in by_name.items():
                yield KeptModel(
                    f"hf:{repo}@{folder.name[:8]}:{name}",
                    folder,
                    tuple(paths),
                    sum(path.stat().st_blocks * 512 for path in paths),
                    folder.stat().st_mtime,
                    all(path.suffix == ".gguf" for path in paths)
                    and all(part.is_file() for part in part_paths(paths[0])),
                )

    def remove(self, model: KeptModel) -> bool:
        """Remove a model's files, and the folder if nothing else is in it.

        Returns:
            Whether it did: not if somebody has one of them loaded, or is fetching it.
        """
        with ExitStack() as locks:
            if not all(_lock(path, locks) for path in model.paths):
                return False
            for path in model.paths:
                path.unlink(missing_ok=True)
                path.with_suffix(".pieces").unlink(missing_ok=True)
        if not any(path.is_file() for path in model.folder.rglob("*")):
            shutil.rmtree(model.folder, ignore_errors=True)
        return True

    def _path(self, repository: Repository, file: RepoFile) -> Path:
        folder = self._root / repository.repo / repository.commit
        path = folder / file.name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise HubUnavailable(f"{repository.repo} has a file called {file.name!r}, which leads elsewhere")
        return path

    def _note(self, reference: HubReference, repository: Repository, files: tuple[RepoFile, ...]) -> None:
        path = self._root / reference.repo / _KNOWN
        known = _load(path)
        known[str(reference)] = {
            "commit": repository.commit,
            "files": [asdict(file) for file in files],
        }
        write_atomically(path, json.dumps(known))

    def _known(self, reference: HubReference) -> tuple[Repository, tuple[RepoFile, ...]] | None:
        """What it was when it was last pulled, if all of that is here."""
        try:
            known = _load(self._root / reference.repo / _KNOWN)[str(reference)]
            files = tuple(RepoFile(**file) for file in known["files"])
            repository = Repository(reference.repo, str(known["commit"]), files)
        except (KeyError, TypeError):
            return None
        paths = [self._path(repository, file) for file in files]
        return (repository, files) if all(path.is_file() for path in paths) else None


def _load(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _whole(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == ".partial" else path


def _lock(path: Path, locks: ExitStack) -> bool:
    """Keep others from loading a file, or fetching it; tells whether nobody was at it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    locks.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _download(
    url: str, file: RepoFile, path: Path, progress: Callable[[str], Callable[[int, int], None]]
) -> None:
    """With two signs of progress, as both take their time: fetching, and checking."""
    counts = {"fetching": 0, "checking": 0}
    bars = {what: progress(f"{what} {path.name}") for what in counts}

    def count(what: str) -> Callable[[int], None]:
        def on_bytes(num_bytes: int) -> None:
            counts[what] += num_bytes
            bars[what](min(counts[what], file.size_bytes), file.size_bytes)

        return on_bytes

    download(
        url,
        file.size_bytes,
        file.sha256,
        path,
        on_bytes=count("fetching"),
        on_hashed=count("checking"),
    )
    log.info("model_pulled", path=str(path), size_bytes=file.size_bytes)
