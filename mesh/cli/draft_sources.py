"""Sources of `mesh draft tune`: recordings, and prompts whose answers are recorded first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mesh.cli.draft_record import record_by_own_mesh, tell
from mesh.cli.options import arguments_of
from mesh.draft.drafter import read_drafter
from mesh.options.host import HeadOptions
from mesh.tuning.prompts import read_prompts
from mesh.tuning.recording import RecordingHeader, create_recording, recorded_model
from mesh.tuning.recording_folder import recorded_prompts
from mesh.tuning.regenerate import unrecorded
from spanmesh_proto.errors import ModelError
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mesh.tuning.prompts import OwnPrompts, Prompt
    from mesh.tuning.regenerate import Wanted

_OWN: Final = "own"


@dataclass(frozen=True)
class RecordingSource:
    """A recording, as a user names it."""

    folder: Path
    prompts: Sequence[Prompt] | OwnPrompts | None
    """What is recorded there first; None of a recording that is there."""


def sources_of(learned: Sequence[str], measured: Sequence[str], beside: Path) -> tuple[RecordingSource, ...]:
    """Recordings, files of prompts and `own:N`, as they were written: first what is learned.

    Args:
        learned: What is learned.
        measured: What is measured only.
        beside: Folder of recordings that are made, each of which is named like its prompts.

    Raises:
        ModelError: If one can be none of these, or if two have the same name.
    """
    found: dict[str, RecordingSource] = {}
    for words in (*learned, *measured):
        path = Path(words)
        if path.is_dir():
            name, source = path.resolve().name, RecordingSource(path, None)
        else:
            name = _OWN if words.startswith(f"{_OWN}:") else path.stem
            source = RecordingSource(beside / name, read_prompts(words, path, is_raw=False))
        if name in found:
            raise ModelError(f"two recordings would be called {name}: rename one of the two files or folders")
        found[name] = source
    return tuple(found.values())


def record_missing(
    sources: Iterable[RecordingSource], model: Path, drafter: Path, wanted: Wanted, record_bytes: int | None
) -> None:
    """Record what sources lack, one after the other, and say on standard error what was recorded.

    Args:
        sources: What is named.
        model: The model's file.
        drafter: The drafter whose features are recorded.
        wanted: How answers are asked for.
        record_bytes: Limit of each recording; None for the usual one.

    Raises:
        MeshError: If the drafter does not fit, a folder is another recording, or the model cannot be served.
    """
    layers = tuple(layer + 1 for layer in read_drafter(drafter, read_model_facts(model)).layers)
    # The drafter itself would compute as well, and bring little where hosts have no network between them.
    options = arguments_of(HeadOptions, tap_layers=layers, record_bytes=record_bytes)
    for source in sources:
        if source.prompts is None:
            continue
        create_recording(source.folder, RecordingHeader(recorded_model(model), layers))
        if unrecorded(source.prompts, recorded_prompts(source.folder)):
            result = record_by_own_mesh(model, source.prompts, source.folder, wanted, options)
            tell(result, source.folder, err=True)
