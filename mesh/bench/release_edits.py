"""Recorded file edits: what changed from one release of a Python package to the next."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Copies of other projects' code change all at once, if they do.
_VENDORED: Final = frozenset({"_vendor", "vendored"})


@dataclass(frozen=True)
class Release:
    """A package at a version, such as `flask` at `3.0.3`."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class ReleasePair:
    """Two releases of one package."""

    package: str
    old: str
    new: str

    @property
    def releases(self) -> tuple[Release, Release]:
        """The older one, then the newer."""
        return Release(self.package, self.old), Release(self.package, self.new)


@dataclass(frozen=True)
class FileEdit:
    """A file before and after.

    Attributes:
        path: Inside the package.
        before: Its text in the older release.
        after: Its text in the newer one.
    """

    path: str
    before: str
    after: str


# None of these had a part in fitting the proposer (`speculative.ngram_index`).
PAIRS: Final = (
    ReleasePair("click", "8.1.8", "8.2.1"),
    ReleasePair("flask", "3.0.3", "3.1.1"),
    ReleasePair("httpx", "0.27.2", "0.28.1"),
    ReleasePair("jinja2", "3.1.2", "3.1.6"),
    ReleasePair("requests", "2.31.0", "2.32.3"),
    ReleasePair("rich", "13.9.4", "14.0.0"),
    ReleasePair("starlette", "0.41.3", "0.46.0"),
    ReleasePair("urllib3", "2.2.3", "2.4.0"),
    ReleasePair("werkzeug", "3.0.6", "3.1.3"),
)


def edits_between(old: Mapping[str, str], new: Mapping[str, str]) -> list[FileEdit]:
    """The files that both have and that differ, by path."""
    return [
        FileEdit(path, old[path], new[path])
        for path in sorted(old.keys() & new.keys())
        if old[path] != new[path]
    ]


def download(pairs: Sequence[ReleasePair], folder: Path) -> Iterator[FileEdit]:
    """The edits between releases, which pip fetches from the index that it is configured for.

    Args:
        pairs: Which releases.
        folder: Where the wheels go; those that are there already are not fetched again.

    Raises:
        MeshError: If pip cannot fetch one.
    """
    for pair in pairs:
        old, new = (read_wheel(_fetch(release, folder)) for release in pair.releases)
        yield from edits_between(old, new)


def read_wheel(path: Path) -> dict[str, str]:
    """The Python files in a wheel, by path."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if _is_wanted(PurePosixPath(name))]
        return {name: wheel.read(name).decode("utf-8", "replace") for name in names}


def read_folder(folder: Path) -> dict[str, str]:
    """The Python files in a folder, by path inside it.

    Raises:
        MeshError: If it is no folder.
    """
    if not folder.is_dir():
        raise MeshError(f"{folder} is not a folder: give one that holds a release")
    paths = (path for path in folder.rglob("*.py") if _is_wanted(PurePosixPath(path.relative_to(folder))))
    return {str(path.relative_to(folder)): path.read_text("utf-8", "replace") for path in paths}


def _is_wanted(path: PurePosixPath) -> bool:
    return path.suffix == ".py" and not _VENDORED.intersection(path.parts)


def _fetch(release: Release, folder: Path) -> Path:
    target = folder / str(release)
    wheel = next(target.glob("*.whl"), None)
    if wheel is None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command = [*pip, "--dest", str(target), str(release)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        wheel = next(target.glob("*.whl"), None)
        if done.returncode or wheel is None:
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            raise MeshError(f"pip cannot download {release}: {lines[-1]}")
    return wheel
