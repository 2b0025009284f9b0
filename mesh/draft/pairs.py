"""Pairs of a model and a drafter that lie side by side, told by their headers.

Side by side are the files of one folder, and those of one repository in the cache of the hub, of all its
commits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from mesh.draft.drafter import read_drafter, serving_command
from mesh.hub import HubLibrary
from spanmesh_proto.errors import MeshError, ModelError, UncuttableModel
from speculative.proposer import DrafterKind
from stages.gguf import is_further_part, read_header
from stages.slicing.drafter_files import drafter_label
from stages.slicing.model_facts import read_model_facts
from stages.weights.disk_cache import default_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stages.slicing.model_facts import ModelFacts

# A folder may hold a user's whole collection, and reading a header takes some milliseconds.
_MOST_FILES: Final = 256


@dataclass(frozen=True)
class DrafterBeside:
    """A drafter that lies beside a model."""

    path: Path
    """Its file, the first if it has several."""
    label: str
    """What it is, as a noun phrase."""
    misfit: str
    """Why it cannot draft for the model; empty if it can, as far as headers tell."""

    def told_for(self, model: Path) -> str:
        """What it is for the model: with the command that serves both, or why it cannot draft."""
        return self.misfit or f"{self.label} for it: {serving_command(model, self.path)}"


def drafters_beside(model: ModelFacts) -> Iterator[DrafterBeside]:
    """Drafters beside a model, in the order of their names.

    Args:
        model: The model.
    """
    for path in _beside(model.path):
        label = _label(path)
        if not label:
            continue
        try:
            read_drafter(path, model)
        except MeshError as error:
            yield DrafterBeside(path, label, error.message)
        else:
            yield DrafterBeside(path, label, "")


def eagle3_beside(model: Path) -> Path:
    """The only EAGLE-3 drafter beside a model that fits it.

    Args:
        model: Its file.

    Raises:
        ModelError: If there is none, or several.
    """
    facts = read_model_facts(model)
    fitting = [each.path for each in drafters_beside(facts) if not each.misfit]
    found = [path for path in fitting if read_drafter(path, facts).kind is DrafterKind.EAGLE3]
    if len(found) == 1:
        return found[0]
    among = f": {', '.join(path.name for path in found)}" if found else ""
    raise ModelError(
        f"{len(found) or 'no'} EAGLE-3 drafters beside {model.name}{among}; name one to begin with by "
        f"--from, or make one with `mesh draft begin {model} -o FILE`"
    )


def models_beside(drafter: Path) -> Iterator[Path]:
    """Models beside a drafter that it can draft for, as far as headers tell, in the order of their names.

    Args:
        drafter: Its file.
    """
    for path in _beside(drafter):
        try:
            read_drafter(drafter, read_model_facts(path))
        except (MeshError, OSError):
            continue
        yield path


def command_with_model(drafter: Path) -> str:
    """The command that serves a drafter with the first model beside it; empty for other files.

    Args:
        drafter: Perhaps the file of a drafter.
    """
    return serving_command(next(models_beside(drafter), "MODEL"), drafter) if _label(drafter) else ""


def require_model(path: Path) -> None:
    """Check that a file is none of a drafter, before it is served or loaded as a model.

    Args:
        path: A file, which may be missing or damaged.

    Raises:
        UncuttableModel: If it is, with the command that serves it with the model beside it.
    """
    if label := _label(path):
        raise UncuttableModel(
            f"{path.name} is {label} and drafts for another model: {command_with_model(path)}"
        )


def _label(path: Path) -> str:
    try:
        return drafter_label(read_header(path))
    except (ModelError, OSError):
        return ""


def _beside(path: Path) -> Iterator[Path]:
    """GGUF files beside one, the first of each that has several."""
    try:
        repository = HubLibrary(default_root()).folder_of(path)
    except MeshError:
        repository = None
    found = path.parent.glob("*.gguf") if repository is None else repository.rglob("*.gguf")
    others = (
        other
        for other in sorted(found)
        if not is_further_part(other) and other.is_file() and not other.samefile(path)
    )
    return islice(others, _MOST_FILES)
