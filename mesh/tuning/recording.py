"""Recordings: folders of conversations of one model, with what they are of.

The folder is readable by its user only. `recording.json` names the model and the layers whose inputs are
recorded; each conversation is a file of its own, see `mesh.tuning.conversation_file`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from mesh.tuning.conversation_file import SUFFIX, FeatureShape
from spanmesh_proto.errors import ModelError
from stages.files import write_error, write_private_file
from stages.gguf import read_header
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from pathlib import Path

    from stages.gguf import GgufHeader

HEADER_NAME: Final = "recording.json"
_VERSION: Final = 1
_ENCODING: Final = "f16"
_MOST_HEADER_BYTES: Final = 64 * 1024
_NUMBERED: Final = re.compile(r"[0-9]{8}" + re.escape(SUFFIX))
# Texts, not tokens, depend on it.
_TEMPLATE: Final = "tokenizer.chat_template"


@dataclass(frozen=True)
class RecordedModel:
    """The model of a recording."""

    header_digest: str
    """SHA-256 in hex: metadata, chat template apart, and tensors' names, shapes and types."""
    architecture: str
    n_layers: int
    n_embd: int
    n_vocab: int
    tokenizer_digest: str
    """SHA-256 of the metadata of the tokenizer, in hex."""


@dataclass(frozen=True)
class RecordingHeader:
    """What the conversations of a recording are of."""

    model: RecordedModel
    layers: tuple[int, ...]
    """Layers whose inputs are the features, as a drafter's file numbers them."""

    @property
    def shape(self) -> FeatureShape:
        """Sizes of its conversations."""
        return FeatureShape(len(self.layers), self.model.n_embd, self.model.n_vocab)


def recorded_model(path: Path) -> RecordedModel:
    """What a recording says of a model.

    Args:
        path: The model's file, the first one if there are several.

    Raises:
        ModelError: If it is no model that generates text.
    """
    facts, header = read_model_facts(path), read_header(path)
    return RecordedModel(
        header_digest=_header_digest(header),
        architecture=facts.architecture,
        n_layers=facts.n_layers,
        n_embd=facts.n_embd,
        n_vocab=facts.n_vocab,
        tokenizer_digest=_metadata_digest(header, "tokenizer.").hexdigest(),
    )


def create_recording(folder: Path, header: RecordingHeader) -> None:
    """Make a folder for conversations, or go on with one of the same model and layers.

    Raises:
        ModelError: If it holds another recording, is readable by others, or cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (folder / HEADER_NAME).exists():
            require_same(read_recording_header(folder), header, folder)
            return
        _require_private(folder)
        said = {"version": _VERSION, **asdict(header), "features": _ENCODING}
        write_private_file(folder / HEADER_NAME, json.dumps(said, indent=2) + "\n")
    except OSError as error:
        raise write_error(folder / HEADER_NAME, error) from error


def read_recording_header(folder: Path) -> RecordingHeader:
    """What a folder's conversations are of.

    Raises:
        ModelError: If it is no recording, or one that others can read.
    """
    path = folder / HEADER_NAME
    try:
        _require_private(folder)
        with path.open("rb") as file:
            data = file.read(_MOST_HEADER_BYTES + 1)
        said = json.loads(data) if len(data) <= _MOST_HEADER_BYTES else None
    except OSError as error:
        raise ModelError(
            f"{folder} is no recording: {path.name}: {error.strerror or error}; make one with "
            "`mesh draft record`"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON: record into another folder") from error
    return _parsed(path, said)


def require_same(found: RecordingHeader, wanted: RecordingHeader, folder: Path) -> None:
    """Check that a recording is of a model and of its layers.

    Raises:
        ModelError: If it is not; the message names the first difference.
    """
    if found.layers != wanted.layers:
        raise ModelError(
            f"{folder} records the inputs of layers {_listed(found.layers)}, the drafter reads those of "
            f"{_listed(wanted.layers)}: record into another folder, or name another drafter"
        )
    for field in reversed(fields(RecordedModel)):
        said, own = getattr(found.model, field.name), getattr(wanted.model, field.name)
        if said != own:
            shown = f"{field.name.replace('_', ' ')} {_short(said)}, not {_short(own)}"
            raise ModelError(
                f"{folder} is a recording of another model ({shown}): record into another folder, or name "
                "its model with --for"
            )


def conversation_path(folder: Path, number: int) -> Path:
    """The file of a conversation by its number, from 0."""
    return folder / f"{number:08d}{SUFFIX}"


def conversation_paths(folder: Path) -> list[Path]:
    """The conversations of a recording, oldest first; files that are still being written are left out.

    Raises:
        ModelError: If the folder cannot be read.
    """
    try:
        return sorted(path for path in folder.iterdir() if _NUMBERED.fullmatch(path.name))
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror or error}") from error


def told_within(message: str, folder: Path) -> str:
    """A message without the path of a recording, for a status, which all API keys may read."""
    return message.replace(f"{folder}{os.sep}", "")


def _require_private(folder: Path) -> None:
    mode = folder.stat().st_mode
    if not stat.S_ISDIR(mode):
        raise ModelError(f"{folder} is no folder: name another one")
    if stat.S_IMODE(mode) & 0o077 or folder.stat().st_uid != os.geteuid():
        raise ModelError(
            f"{folder} can be read by others, and texts can be restored from a recording: `chmod 700` it, "
            "as its owner"
        )


def _parsed(path: Path, said: Any) -> RecordingHeader:
    version = said.get("version") if isinstance(said, dict) else None
    if version != _VERSION or said.get("features") != _ENCODING:
        raise ModelError(
            f"{path} is of version {version!r}, need {_VERSION} with features in {_ENCODING}: record into "
            "another folder"
        )
    model, layers = said.get("model"), said.get("layers")
    kinds: dict[str, type] = {
        field.name: int if field.type == "int" else str for field in fields(RecordedModel)
    }
    is_whole = isinstance(model, dict) and {name: type(value) for name, value in model.items()} == kinds
    if not is_whole or not isinstance(layers, list) or not layers:
        raise ModelError(f"{path} does not say of which model and layers it is: record into another folder")
    found = RecordedModel(**model)
    sizes = (found.n_layers, found.n_embd, found.n_vocab)
    if not all(0 < size < 2**32 for size in sizes) or not all(
        type(layer) is int and 0 <= layer <= found.n_layers for layer in layers
    ):
        raise ModelError(f"{path} names sizes or layers that no model has: record into another folder")
    return RecordingHeader(found, tuple(layers))


def _header_digest(header: GgufHeader) -> str:
    digest = _metadata_digest(header, "")
    for name, tensor in sorted(header.tensors.items()):
        digest.update(f"{name} {tensor.shape} {tensor.type.name}\n".encode())
    found: str = digest.hexdigest()
    return found


def _metadata_digest(header: GgufHeader, prefix: str) -> Any:
    digest = hashlib.sha256()
    for key, value in sorted(header.metadata.items()):
        # The same model in one file and in several has the same digest.
        if key.startswith(prefix) and key != _TEMPLATE and not key.startswith("split."):
            digest.update(f"{key} {value.type} {value.count} {len(value.payload)}\n".encode())
            digest.update(value.payload)
    return digest


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))


def _short(value: int | str) -> str:
    return value[:12] if isinstance(value, str) else f"{value:,}"
