"""Library: models in folders of the head's host, by name."""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from mesh.options.model import NONE, LoadRequest, model_options_in
from spanmesh_proto.errors import InvalidRequest, ModelError
from stages.cancellable_work import CancellableWork
from stages.gguf import is_further_part, model_name, part_paths
from stages.slicing.model_facts import read_model_facts
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mesh.options.host import HeadOptions
    from stages.slicing.model_facts import ModelSummary
    from stages.weights.hashing import FileStamp

_SUFFIX: Final = ".gguf"
# Deep enough for the folders that a hub's own client keeps, shallow enough for a folder named by mistake.
_MOST_LEVELS: Final = 5
_MOST_FILES: Final = 4096
# Between two searches of the folders: any client may have them searched.
_FRESH_S: Final = 2.0
# For all threads of a host: `ModelAllocation.threads_of` takes those that it has.
_ALL_THREADS: Final = 1024

log = structlog.get_logger()


@dataclass(frozen=True)
class LibraryEntry:
    """A model of the library."""

    name: str
    """Its name for clients, that of its file."""
    path: Path
    """Its file, the first if it has several."""
    created_s: int
    """Last change of that file, Unix seconds."""
    summary: ModelSummary
    """What its files say."""
    projector: Path | None = None
    """Its projector for pictures; None for a model that reads text only."""


class Library:
    """Models in some folders and in folders within them. Files that no model can be served from are left out.

    A model reads pictures with the projector that lies beside it under its own name, `mmproj-MODEL.gguf`: any
    other file may be of another model.

    Args:
        folders: Folders; of two models of one name the first counts.
        clock_s: Monotonic, seconds.

    Attributes:
        entries: Models by name, as of the latest search.
    """

    def __init__(self, folders: Sequence[Path], clock_s: Callable[[], float]) -> None:
        self._folders = tuple(folders)
        self._clock_s = clock_s
        self._known: dict[Path, tuple[tuple[FileStamp, ...], LibraryEntry | None]] = {}
        self._searched_at_s = -math.inf
        self._search: asyncio.Task[None] | None = None
        self.entries: Mapping[str, LibraryEntry] = {}

    async def refresh(self, *, max_age_s: float = _FRESH_S) -> None:
        """Search the folders, in a thread, unless that was done a moment ago.

        Args:
            max_age_s: Age up to which the latest search is good enough, in seconds.
        """
        if self._search is None and self._clock_s() - self._searched_at_s >= max_age_s:
            # It outlives the request that began it and does not inherit that request's log fields.
            self._search = asyncio.create_task(self._refresh(), context=contextvars.Context())
        if self._search is not None:
            # Others may wait for the same search.
            await asyncio.shield(self._search)

    async def _refresh(self) -> None:
        try:
            self.entries = await CancellableWork().run(self.search)
        finally:
            self._searched_at_s = self._clock_s()
            self._search = None

    def search(self) -> dict[str, LibraryEntry]:
        """Models by name, in the order of their names. Blocks. Unchanged files are not read again."""
        found: dict[str, LibraryEntry] = {}
        known: dict[Path, tuple[tuple[FileStamp, ...], LibraryEntry | None]] = {}
        for path in files_of(self._folders):
            try:
                stamps = stamps_of(part_paths(path))
            except ModelError as error:
                log.info("library_file_left_out", path=str(path), reason=error.message)
                continue
            before = self._known.get(path)
            entry = before[1] if before is not None and before[0] == stamps else _read(path)
            known[path] = (stamps, entry)
            if entry is not None:
                found.setdefault(entry.name, replace(entry, projector=_projector_of(path)))
        self._known = known
        return dict(sorted(found.items()))


def files_of(folders: Sequence[Path]) -> Iterator[Path]:
    """Files that may be models, one for each model, in order; hidden folders are left out.

    Args:
        folders: Folders that are searched.
    """
    num_files = 0
    for folder in folders:
        for place, inner, names in os.walk(folder):
            is_deep = len(Path(place).relative_to(folder).parts) + 1 >= _MOST_LEVELS
            inner[:] = [] if is_deep else sorted(name for name in inner if not name.startswith("."))
            for name in sorted(names):
                path = Path(place, name)
                if path.suffix != _SUFFIX or name.startswith(".") or is_further_part(path):
                    continue
                if not _is_file(path):
                    continue
                num_files += 1
                if num_files > _MOST_FILES:
                    log.warning("library_too_large", folder=str(folder), most_files=_MOST_FILES)
                    return
                yield path


def _projector_of(path: Path) -> Path | None:
    projector = path.with_name(f"mmproj-{model_name(path)}{_SUFFIX}")
    return projector if _is_file(projector) else None


def _is_file(path: Path) -> bool:
    """Whether it is a file, or a link to one: to open a pipe would wait for ever."""
    try:
        return path.is_file()
    except OSError:
        # A link into a folder that may not be read.
        return False


def _read(path: Path) -> LibraryEntry | None:
    """The model of a file; None if none can be served from it."""
    try:
        facts = read_model_facts(path)
        name = LoadRequest(model=str(path)).served_name
        created_s = int(path.stat().st_mtime)
    except (ModelError, InvalidRequest, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.message
        log.info("library_file_left_out", path=str(path), reason=reason)
        return None
    except Exception:
        # A file that no check foresaw must not hide all others.
        log.exception("library_file_left_out", path=str(path))
        return None
    return LibraryEntry(name, path, created_s, facts.summary)


def smallest_model(folders: Sequence[Path]) -> Path | None:
    """File of the smallest model in some folders; None if there is none. Blocks.

    Args:
        folders: Folders that are searched.
    """
    entries = Library(folders, clock_s=lambda: 0.0).search().values()
    smallest = min(entries, key=lambda entry: (entry.summary.file_bytes, entry.name), default=None)
    return None if smallest is None else smallest.path


def load_request_of(entry: LibraryEntry, options: HeadOptions) -> LoadRequest:
    """Request that loads a model of the library with the options of `mesh serve`.

    Args:
        entry: The model.
        options: Options of `mesh serve`, before they were fitted to its own model. Those of its draft model,
            and of its placement, are left out.
    """
    return LoadRequest(
        **model_options_in(options)
        | {
            "model": str(entry.path),
            "mmproj": NONE if entry.projector is None else str(entry.projector),
            "name": entry.name,
            "evictable": True,
            "threads": options.library_threads or _ALL_THREADS,
            "speculate": "auto" if options.speculate in {"draft", "replay"} else options.speculate,
            **dict.fromkeys(("draft_path", "replay_path", "stages", "split")),
            "replay_rates": (),
        }
    )
