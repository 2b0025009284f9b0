"""Projectors: their memory on the head, those beside a model, and the library that they need."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mesh.placement.encoder_host import EncoderSizes
from mesh.placement.memory_estimate import PROCESS_BYTES
from mesh.vision.projector_trial import known_trial, tried_out
from spanmesh_proto.errors import MeshError
from stages.gguf import read_header
from stages.process_limits import num_bound
from stages.units import format_size
from stages.vision.library import mtmd_path
from stages.vision.projector import MOST_TOKENS, ProjectorOptions
from stages.vision.projector_file import check_projector

if TYPE_CHECKING:
    from collections.abc import Iterator

_N_LAYERS: Final = "clip.vision.block_count"
# Measured on x86-64 Linux with the vocabulary of SmolLM2: Python, its libraries, llama.cpp's code, 55 MB.
_ENCODER_BYTES: Final = 64 * 2**20
# Two processes of 15 MB. What they decode they hold for a second or two.
_READER_BYTES: Final = 2 * 24 * 2**20
# Of the projector's weights, for what is computed of a picture.
_COMPUTED_SHARE: Final = 0.25


@dataclass(frozen=True)
class PictureNeeds:
    """What pictures need of a mesh."""

    num_bytes: int = 0
    """Memory on the head's host."""
    most_at_once: int = 0
    """Most rows that stages compute at once for them, as far as is known."""
    is_measured: bool = False
    """Whether both were measured, or the memory is an estimate by the projector's header."""


def encoder_sizes(options: ProjectorOptions) -> EncoderSizes:
    """Sizes of a projector on a host: measured if it was tried out on this one, else estimates by its header.

    Raises:
        InvalidModel: If it is no GGUF.
    """
    projector = Path(options.path)
    header = read_header(projector)
    weight_bytes = sum(tensor.n_bytes for tensor in header.tensors.values())
    compute_bytes = int(_COMPUTED_SHARE * weight_bytes)
    if (trial := known_trial(options)) is not None:
        compute_bytes = max(0, trial.memory.host_bytes - weight_bytes - _ENCODER_BYTES)
    return EncoderSizes(
        projector,
        max(1, header.integer(_N_LAYERS, 0)),
        weight_bytes,
        compute_bytes,
        PROCESS_BYTES + _ENCODER_BYTES,
        is_measured=trial is not None,
    )


def checked_picture_bytes(options: ProjectorOptions) -> int:
    """Bytes of the head's processes for pictures of one model, whose projector is checked by its header.

    Args:
        options: Settings of the projector, which is loaded whole.

    Raises:
        InvalidModel: If the projector is none for pictures, of a kind that is not served, or the model's
            family takes none.
        ClusterError: If libmtmd is missing.
    """
    mtmd_path()
    check_projector(Path(options.path), options.model_path)
    sizes = encoder_sizes(options)
    return _READER_BYTES + sizes.head_bytes


def needs_of(
    projector: Path, model: Path, *, most_tokens: int = MOST_TOKENS, is_tried: bool = False
) -> PictureNeeds:
    """What pictures of one model need; blocks while the projector is tried out.

    Args:
        projector: The projector.
        model: The model.
        most_tokens: See `ProjectorOptions.most_tokens`.
        is_tried: Whether the projector may be tried out on this host, if it was not before.

    Raises:
        InvalidModel: If the projector cannot be used with the model.
        ClusterError: If libmtmd is missing.
        StageFailed: If it does not compute.
    """
    options = ProjectorOptions(str(projector), str(model), num_bound(), most_tokens=most_tokens)
    checked_picture_bytes(options)
    trial = asyncio.run(tried_out(options)) if is_tried else known_trial(options)
    most_at_once = 0 if trial is None else trial.most_at_once
    return PictureNeeds(checked_picture_bytes(options), most_at_once, is_measured=trial is not None)


def library_state() -> str:
    """Whether models can read pictures with this installation, in a sentence."""
    try:
        mtmd_path()
    except MeshError as error:
        return f"models read text only: {error.message}"
    return "libmtmd is installed: a model reads pictures with its projector"


def projectors_beside(model: Path) -> Iterator[tuple[str, str]]:
    """Files called projectors in the folder of a model, each with what it is: the command, or why it is none.

    Args:
        model: The model's file.
    """
    for path in sorted(model.parent.glob("*mmproj*.gguf")):
        try:
            kind = check_projector(path, model)
        except MeshError as error:
            yield path.name, error.message
        else:
            sizes = encoder_sizes(ProjectorOptions(str(path), str(model), num_threads=1))
            how = "measured" if sizes.is_measured else "estimated; `mesh plan` measures it"
            size = f"{format_size(sizes.head_bytes)}, {how}"
            yield path.name, f"for pictures ({kind}; {size}): mesh serve {model} --mmproj {path}"
