"""Models of Hugging Face: references, choice of files, downloads and the local library."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import structlog

from spanmesh_proto.errors import ClusterError, HubUnavailable, ModelError
from stages.files import try_lock, write_atomically
from stages.gguf import model_name, part_paths
from stages.weights.http_download import TransientError, download, endpoint, refusal
from stages.weights.piece_sources import HubFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_PART: Final = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})")
# The default of llama.cpp's own commands.
_USUAL: Final = "Q4_K_M"
# Files beside models that are none.
_NO_MODEL: Final = re.compile(r"mmproj|imatrix", re.IGNORECASE)
# Projectors for pictures beside them, and their formats without loss to speak of.
_PROJECTOR: Final = re.compile(r"mmproj", re.IGNORECASE)
_PROJECTOR_QUANTS: Final = ("F16", "Q8_0", "BF16")
# Drafters beside them, by the names that repositories and llama.cpp's own commands give them. A whole model
# with a head may have `MTP` in its name.
_DRAFTER: Final = re.compile(r"(?:^|/)mtp-|(?:^|[-._/])(?i:eagle3?|dflash2?|dspark|assistant)(?:$|[-._])")
_QUANT: Final = re.compile(r"(?:^|[-._/])((?:I?Q[0-9]|TQ[0-9]|BF16|F16|F32|MXFP4)[A-Z0-9_]*)", re.IGNORECASE)
PREFIX: Final = "hf:"
# The hub's own rule; folders here use the name, too.
_NAME: Final = r"(?![A-Za-z0-9_.-]*(?:\.\.|--))[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_REFERENCE: Final = re.compile(
    rf"hf:(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[^:@\s]+))?(?::(?P<wanted>[\w./-]+))?"
)
# git's commit ids, by SHA-1 or SHA-256. Folders here use them as names.
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TIMEOUT_S: Final = 20.0
_MOST_TRIES: Final = 4
_FIRST_PAUSE_S: Final = 0.5
_MOST_PAUSE_S: Final = 30.0
_KNOWN: Final = "known.json"

log = structlog.get_logger()


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository."""

    name: str
    """Path within the repository."""
    size_bytes: int
    """Its size."""
    sha256: str | None
    """Hash of its content, hex, if the hub knows it."""


@dataclass(frozen=True)
class HubReference:
    """A model at the hub."""

    repo: str
    """`org/repo`."""
    revision: str = "main"
    """Branch, tag or commit."""
    wanted: str | None = None
    """Quantisation, or the file's name; None if the repository has only one model."""

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{PREFIX}{self.repo}{revision}" + (f":{self.wanted}" if self.wanted else "")


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    repo: str
    """`org/repo`."""
    commit: str
    """Its hash, hex; the files of a commit do not change."""
    files: tuple[RepoFile, ...]
    """Its files."""

    def url(self, file: RepoFile) -> str:
        """URL of a file."""
        from huggingface_hub import hf_hub_url  # noqa: PLC0415 - an extra

        return str(hf_hub_url(self.repo, file.name, revision=self.commit, endpoint=endpoint()))


@dataclass(frozen=True)
class PulledModel:
    """A model of the hub on this disk."""

    path: Path
    """Its first file."""
    hub: tuple[HubFile, ...]
    """All its files at the hub."""


@dataclass(frozen=True)
class CachedModel:
    """A cached model of the hub."""

    name: str
    """`hf:org/repo@COMMIT:NAME`, the commit by its beginning."""
    folder: Path
    """Folder of its commit."""
    paths: tuple[Path, ...]
    """Its files."""
    size_bytes: int
    """Their size."""
    used_at_s: float
    """When it was last pulled or served, Unix seconds."""
    is_whole: bool
    """Whether all of its files are complete."""


def choose(reference: HubReference, files: Sequence[RepoFile]) -> tuple[RepoFile, ...]:
    """The files of the requested model, in the order of its parts.

    Args:
        reference: The request.
        files: Files of the repository.

    Raises:
        HubUnavailable: If there is no such model, there are several, or parts of it are missing.
    """
    every = _models(files)
    if not every:
        raise HubUnavailable(
            f"{reference.repo} has no GGUF file: name a repository with GGUFs, often called "
            f"{reference.repo}-GGUF"
        )
    # A repository of drafters has no others.
    models = {name: parts for name, parts in every.items() if not _DRAFTER.search(name)} or every
    wanted = reference.wanted
    if wanted is None:
        found = list(models) if len(models) == 1 else [name for name in models if _has(name, _USUAL)]
    else:
        found = [name for name in every if _is_called(name, wanted)] or [
            name for name in models if _has(name, wanted)
        ]
    if len(found) != 1:
        among = ", ".join(sorted({_label(name) for name in (found or models)}))
        trouble = f"{len(found)} models fit" if found else "no model fits"
        raise HubUnavailable(f"{trouble} {reference}: choose one after a colon; there are {among}")
    return _parts(reference, found[0], every[found[0]])


def choose_projector(reference: HubReference, files: Sequence[RepoFile]) -> RepoFile | None:
    """The projector of a repository: the one that is named, or else the smallest in a usual format.

    Args:
        reference: The request; a name in it is one of a projector.
        files: Files of the repository.

    Returns:
        None if it has none, and none was named.

    Raises:
        HubUnavailable: If there is none of that name, or several.
    """
    found = [file for file in files if file.name.endswith(".gguf") and _PROJECTOR.search(file.name)]
    wanted = reference.wanted
    if wanted is None:
        usual = [file for file in found if any(_has(_stem(file), quant) for quant in _PROJECTOR_QUANTS)]
        return min(usual or found, key=lambda file: (file.size_bytes, file.name), default=None)
    named = [file for file in found if _is_called(_stem(file), wanted)] or [
        file for file in found if _has(_stem(file), wanted)
    ]
    if len(named) != 1:
        among = ", ".join(sorted(_stem(file) for file in found)) or "none"
        trouble = f"{len(named)} projectors fit" if named else "no projector fits"
        raise HubUnavailable(f"{trouble} {reference}: choose one after a colon; there are {among}")
    return named[0]


def _stem(file: RepoFile) -> str:
    return file.name.removesuffix(".gguf")


def drafters_in(repository: Repository) -> tuple[str, ...]:
    """Names of a repository's drafters, as their files are called; none where it has nothing else."""
    names = _models(repository.files)
    drafters = tuple(sorted(name for name in names if _DRAFTER.search(name)))
    return drafters if len(drafters) < len(names) else ()


def _models(files: Sequence[RepoFile]) -> dict[str, list[RepoFile]]:
    """Files by name without `.gguf` and without the number of a part."""
    models: dict[str, list[RepoFile]] = {}
    for file in files:
        if not file.name.endswith(".gguf") or _NO_MODEL.search(file.name):
            continue
        stem = file.name.removesuffix(".gguf")
        match = _PART.fullmatch(stem)
        models.setdefault(match[1] if match else stem, []).append(file)
    return models


def _is_called(name: str, wanted: str) -> bool:
    wanted = wanted.removesuffix(".gguf")
    match = _PART.fullmatch(wanted)
    wanted = match[1] if match else wanted
    return wanted in {name, PurePosixPath(name).name}


def _has(name: str, quant: str) -> bool:
    """Whether a file's name ends in a quantisation, or a folder is named so."""
    return bool(re.search(rf"(?:^|[-._/]){re.escape(quant)}(?:$|/)", name, re.IGNORECASE))


def _label(name: str) -> str:
    match = _QUANT.search(name)
    return match[1] if match else name


def _parts(reference: HubReference, name: str, files: list[RepoFile]) -> tuple[RepoFile, ...]:
    match = _PART.fullmatch(files[0].name.removesuffix(".gguf"))
    if match is None:
        return tuple(files)
    count = int(match[3])
    by_name = {file.name: file for file in files}
    parts = [f"{name}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    missing = [part for part in parts if part not in by_name]
    if missing:
        raise HubUnavailable(f"{reference.repo} lacks {missing[0]}: take another quantisation")
    return tuple(by_name[part] for part in parts)


def is_reference(text: str) -> bool:
    """Whether an argument names a model of the hub, not a file."""
    return text.startswith(PREFIX)


def parse_reference(text: str) -> HubReference:
    """Parse `hf:org/repo:QUANT`.

    Raises:
        ModelError: If it is malformed.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise ModelError(f"{text!r} is not a model at the hub; write it like hf:org/repo:Q4_K_M")
    return HubReference(match["repo"], match["revision"] or "main", match["wanted"])


def read_repository(reference: HubReference, *, sleep: Callable[[float], None] = time.sleep) -> Repository:
    """Query the hub.

    Args:
        reference: Repository and revision.
        sleep: Waits for seconds, between tries.

    Raises:
        HubUnavailable: If it refuses, has no such repository, or does not answer.
        ClusterError: If the extra for the hub is not installed.
    """
    for num_tries in range(1, _MOST_TRIES + 1):
        try:
            return _read(reference)
        except TransientError as error:
            if num_tries == _MOST_TRIES:
                raise HubUnavailable(
                    f"{endpoint()} does not deliver {reference.repo}: {error.reason}, {num_tries} times; "
                    "check the connection, and try again later"
                ) from None
            sleep(min(error.pause_s or _FIRST_PAUSE_S * 2**num_tries, _MOST_PAUSE_S))
    raise AssertionError("the last try returns or raises")


# ::
#
#     models/<org>/<repo>/<commit>/…   the files, as they are called at the hub
#     models/<org>/<repo>/known.json   what was asked for, and which commit and files that was
class HubLibrary:
    """Cache of the hub's models on this host.

    Args:
        root: Folder of the cache.
        read: Queries the hub for a repository.
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
        found = self._pull(str(reference), reference, lambda files: choose(reference, files), progress)
        assert found is not None  # noqa: S101 - a model has files
        return found

    def pull_projector(
        self, reference: HubReference, progress: Callable[[str], Callable[[int, int], None]]
    ) -> Path | None:
        """Bring a repository's projector here, see `choose_projector`; arguments and errors as `pull`."""

        def choose_one(files: Sequence[RepoFile]) -> tuple[RepoFile, ...]:
            found = choose_projector(reference, files)
            return () if found is None else (found,)

        found = self._pull(f"{reference} mmproj", reference, choose_one, progress)
        return None if found is None else found.path

    def _pull(
        self,
        name: str,
        reference: HubReference,
        choose_from: Callable[[Sequence[RepoFile]], tuple[RepoFile, ...]],
        progress: Callable[[str], Callable[[int, int], None]],
    ) -> PulledModel | None:
        """Bring files here that make a whole; None if there are none to bring.

        Args:
            name: Under which it is noted what was found.
            reference: Repository and revision.
            choose_from: Chooses among all files of the repository.
            progress: See `pull`.
        """
        try:
            repository = self._read(reference)
            files = choose_from(repository.files)
        except HubUnavailable as error:
            known = self._known(name, reference.repo)
            if known is None:
                raise
            log.warning("hub_not_asked", model=str(reference), reason=error.message)
            repository, files = known
        paths = [self._path(repository, file) for file in files]
        for file, path in zip(files, paths, strict=True):
            if path.is_file() and path.stat().st_size == file.size_bytes:
                continue
            _download(repository.url(file), file, path, progress)
        self._note(name, repository, files)
        if not files:
            return None
        (self._root / repository.repo / repository.commit).touch()  # when it was last used
        hub = tuple(HubFile(repository.url(file), file.size_bytes) for file in files)
        return PulledModel(paths[0], hub)

    def models(self) -> Iterator[CachedModel]:
        """Every model that is here, or begun."""
        for folder in sorted(path for path in self._root.glob("*/*/*") if path.is_dir()):
            repo = "/".join(folder.relative_to(self._root).parts[:2])
            by_name: dict[str, list[Path]] = {}
            for path in sorted(folder.rglob("*.gguf*")):
                if path.suffix in {".gguf", ".partial"}:
                    by_name.setdefault(model_name(_whole(path)), []).append(path)
            for name, paths in by_name.items():
                yield CachedModel(
                    f"hf:{repo}@{folder.name[:8]}:{name}",
                    folder,
                    tuple(paths),
                    sum(path.stat().st_blocks * 512 for path in paths),
                    folder.stat().st_mtime,
                    all(path.suffix == ".gguf" for path in paths)
                    and all(part.is_file() for part in part_paths(paths[0])),
                )

    def folder_of(self, path: Path) -> Path | None:
        """Folder of the repository that a file in the cache is of; None for other files."""
        root, whole = self._root.absolute(), path.absolute()
        parts = whole.relative_to(root).parts if whole.is_relative_to(root) else ()
        # Organisation, repository, commit, and the name.
        return root.joinpath(*parts[:2]) if len(parts) >= 4 else None

    def drafters(self, reference: HubReference) -> tuple[HubReference, ...]:
        """Drafters in the repository of a model, by their names; none if the hub does not answer."""
        try:
            repository = self._read(reference)
        except HubUnavailable as error:
            log.info("hub_not_asked", model=str(reference), reason=error.message)
            return ()
        return tuple(replace(reference, wanted=name) for name in drafters_in(repository))

    def remove(self, model: CachedModel) -> bool:
        """Remove a model's files, and the folder if nothing else is in it.

        Returns:
            Whether it did: not if one of them is loaded or being fetched.
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
            raise HubUnavailable(
                f"{repository.repo} has a file named {file.name!r}, which leads out of its folder"
            )
        return path

    def _note(self, name: str, repository: Repository, files: tuple[RepoFile, ...]) -> None:
        path = self._root / repository.repo / _KNOWN
        known = _load(path)
        known[name] = {
            "commit": repository.commit,
            "files": [asdict(file) for file in files],
        }
        write_atomically(path, json.dumps(known))

    def _known(self, name: str, repo: str) -> tuple[Repository, tuple[RepoFile, ...]] | None:
        """What was found when it was last pulled, if all of that is here."""
        try:
            known = _load(self._root / repo / _KNOWN)[name]
            files = tuple(RepoFile(**file) for file in known["files"])
            repository = Repository(repo, str(known["commit"]), files)
        except (KeyError, TypeError):
            return None
        paths = [self._path(repository, file) for file in files]
        return (repository, files) if all(path.is_file() for path in paths) else None


def _read(reference: HubReference) -> Repository:
    try:
        import httpx2  # noqa: PLC0415 - comes with the extra
        from huggingface_hub import HfApi  # noqa: PLC0415 - an extra
        from huggingface_hub.errors import (  # noqa: PLC0415
            HfHubHTTPError,
            HFValidationError,
            OfflineModeIsEnabled,
        )
    except ImportError:
        raise ClusterError(
            "models from the hub need the package huggingface_hub: pip install 'spanmesh[hub]'"
        ) from None
    try:
        info = HfApi(endpoint=endpoint()).model_info(
            reference.repo, revision=reference.revision, files_metadata=True, timeout=_TIMEOUT_S
        )
    except HfHubHTTPError as error:
        answer = error.response
        raise refusal(reference.repo, answer.status_code, answer.headers.get("Retry-After")) from None
    except OfflineModeIsEnabled:
        raise HubUnavailable(
            f"{reference} is at the hub, and HF_HUB_OFFLINE forbids access: unset it, or name a file"
        ) from None
    except (httpx2.HTTPError, OSError) as error:
        raise TransientError(f"no answer ({error or type(error).__name__})") from None
    except HFValidationError:
        raise HubUnavailable(
            f"{reference.repo!r} is not a valid repository name: check it at the hub"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise _no_hub() from None
    if not _COMMIT.fullmatch(info.sha or ""):
        raise _no_hub()
    return Repository(reference.repo, info.sha, tuple(map(_file, info.siblings or ())))


def _no_hub() -> HubUnavailable:
    return HubUnavailable(
        f"{endpoint()} does not answer like a hub: check HF_ENDPOINT, and whether a proxy or a login page "
        "is in between"
    )


def _file(sibling: Any) -> RepoFile:
    lfs = sibling.lfs
    return RepoFile(sibling.rfilename, int(sibling.size or 0), None if lfs is None else str(lfs.sha256))


def _load(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _whole(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == ".partial" else path


def _lock(path: Path, locks: ExitStack) -> bool:
    """Lock a file against loading and fetching; returns whether it was free."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    locks.callback(os.close, descriptor)
    return try_lock(descriptor)


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
