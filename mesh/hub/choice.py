"""Which files of a repository are the model that is wanted. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import HubUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.hub.reference import HubReference

_PART: Final = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})")
# As llama.cpp's own commands choose if nothing is said.
_USUAL: Final = "Q4_K_M"
# What lies beside models and is none.
_NO_MODEL: Final = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_QUANT: Final = re.compile(r"(?:^|[-._/])((?:I?Q[0-9]|TQ[0-9]|BF16|F16|F32|MXFP4)[A-Z0-9_]*)", re.IGNORECASE)


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository.

    Attributes:
        name: With its folders.
        size_bytes: Its size.
        sha256: Of its content, hex, if the hub knows it.
    """

    name: str
    size_bytes: int
    sha256: str | None


def choose(reference: HubReference, files: Sequence[RepoFile]) -> tuple[RepoFile, ...]:
    """The files of the model that is wanted, in the order of its parts.

    Args:
        reference: What is wanted.
        files: All that the repository has.

    Raises:
        HubUnavailable: If there is no such model, several, or parts of it are missing.
    """
    models = _models(files)
    if not models:
        raise HubUnavailable(
            f"{reference.repo} has no GGUF file: name a repository with GGUFs, often called "
            f"{reference.repo}-GGUF"
        )
    wanted = reference.wanted
    if wanted is None:
        found = list(models) if len(models) == 1 else [name for name in models if _has(name, _USUAL)]
    else:
        found = [name for name in models if _is_called(name, wanted)] or [
            name for name in models if _has(name, wanted)
        ]
    if len(found) != 1:
        among = ", ".join(sorted({_label(name) for name in (found or models)}))
        trouble = f"{len(found)} models fit" if found else "no model fits"
        raise HubUnavailable(f"{trouble} {reference}: say which after a colon; there are {among}")
    return _parts(reference, found[0], models[found[0]])


def _models(files: Sequence[RepoFile]) -> dict[str, list[RepoFile]]:
    """By name without `.gguf` and without the number of a part."""
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
    """Whether a file's name ends in a quantisation, or a folder is called by it."""
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
