"""Projectors: their memory on the head, those beside a model, and the library that they need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.placement.encoder_host import EncoderSizes
from mesh.placement.memory_estimate import PROCESS_BYTES
from spanmesh_proto.errors import MeshError
from stages.gguf import read_header
from stages.vision.library import mtmd_path
from stages.vision.projector_file import check_projector

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_N_LAYERS: Final = "clip.vision.block_count"
# Measured on x86-64 Linux with the vocabulary of SmolLM2: Python, its libraries, llama.cpp's code, 55 MB.
_ENCODER_BYTES: Final = 64 * 2**20
# Two processes of 15 MB. What they decode they hold for a second or two.
_READER_BYTES: Final = 2 * 24 * 2**20
# Of the projector's weights, for what is computed of a picture.
_COMPUTED_SHARE: Final = 0.25


def encoder_sizes(projector: Path) -> EncoderSizes:
    """Sizes of a projector on a host, by its header: its weights, and estimates of all else.

    Raises:
        InvalidModel: If it is no GGUF.
    """
    header = read_header(projector)
    weight_bytes = sum(tensor.n_bytes for tensor in header.tensors.values())
    return EncoderSizes(
        projector,
        max(1, header.integer(_N_LAYERS, 0)),
        weight_bytes,
        int(_COMPUTED_SHARE * weight_bytes),
        PROCESS_BYTES + _ENCODER_BYTES,
    )


def checked_picture_bytes(projector: Path, model: Path) -> int:
    """Bytes of the head's processes for pictures of one model, whose projector is checked by its header.

    Args:
        projector: The projector, which is loaded whole.
        model: The model.

    Raises:
        InvalidModel: If the projector is none for pictures, of a kind that is not served, or the model's
            family takes none.
        ClusterError: If libmtmd is missing.
    """
    mtmd_path()
    check_projector(projector, model)
    sizes = encoder_sizes(projector)
    return _ENCODER_BYTES + _READER_BYTES + sizes.weight_bytes + sizes.compute_bytes


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
            yield path.name, f"for pictures ({kind}): mesh serve {model} --mmproj {path}"
