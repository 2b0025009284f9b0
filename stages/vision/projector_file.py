"""Projector file, such as `mmproj-F16.gguf`: whether it is one for pictures, and for a model's family.

libmtmd ends the process on some files and models, so headers are checked before it sees them. Whether rows
are as wide as the model's embedding, it tells itself, before it computes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import InvalidModel
from stages.gguf import read_header
from stages.runtime.row_positions import NEED_PARTS

if TYPE_CHECKING:
    from pathlib import Path

    from stages.gguf import GgufHeader

_ARCHITECTURE: Final = "clip"
_HAS_VISION: Final = "clip.has_vision_encoder"
_KIND: Final = "clip.projector_type"
# Of files that hear as well.
_KIND_OF_VISION: Final = "clip.vision.projector_type"

KINDS: Final = frozenset(
    {
        *("adapter", "cogvlm", "deepseekocr", "deepseekocr2", "dots3note_v", "dots_ocr"),
        *("exaone4_5", "gemma3", "gemma3nv", "gemma4uv", "gemma4v", "glm4v", "glm5v"),
        *("granite4_vision", "idefics3", "internvl", "janus_pro", "kimik25", "kimivl", "ldp"),
        *("ldpv2", "lfm2", "lightonocr", "ling3vl", "llama4", "mimovl", "minicpmv4_6"),
        *("minimax_m3", "mlp", "muse-glimmer", "nemotron_v2_vl", "paddleocr", "phi4", "pixtral"),
        *("qwen2.5o", "qwen2.5vl_merger", "qwen2vl_merger", "qwen3vl_merger", "resampler"),
        *("step3vl", "yasa2", "youtuvl"),
    }
)
"""Projectors for pictures, by llama.cpp's names of them."""

REFUSED: Final = {
    "hunyuanvl": "HunyuanVL: positions of its rows depend on the number of the picture in the prompt",
    "deepseek4v": "DeepSeek-4 Vision: its rows depend on their place in the prompt",
}
"""Projectors for pictures whose rows are not those of a picture alone, and why."""


def check_projector(path: Path, model: Path) -> str:
    """Check a projector's header, and whether a model's family takes rows of pictures, in milliseconds.

    Args:
        path: The projector's file.
        model: The model's file, the first one if there are several.

    Returns:
        llama.cpp's name of the projector's kind.

    Raises:
        InvalidModel: If it is no projector for pictures, of a kind that is not known or not served, or the
            model's family takes none.
    """
    header = read_header(path)
    kind = _kind_of(header)
    if kind in REFUSED:
        raise InvalidModel(
            f"{path.name} is not served ({REFUSED[kind]}): leave out --mmproj, or take another"
        )
    if kind not in KINDS:
        raise InvalidModel(
            f"{path.name} is a projector of kind {kind!r}, which is not known here as one for pictures: take"
            " another, or update spanmesh"
        )
    _check_model(read_header(model))
    return kind


def _kind_of(header: GgufHeader) -> str:
    name = header.path.name
    if header.architecture != _ARCHITECTURE:
        raise InvalidModel(
            f"{name} is a model ({header.architecture}) and no projector: name its mmproj file for --mmproj"
        )
    has_vision = header.metadata.get(_HAS_VISION)
    if has_vision is None or has_vision.decode() is not True:
        raise InvalidModel(
            f"{name} is a projector for something else than pictures ({_HAS_VISION} is not true): take one"
            " for pictures; sound and video are not served"
        )
    return header.text(_KIND, "") or header.text(_KIND_OF_VISION, "")


def _check_model(header: GgufHeader) -> None:
    architecture = header.architecture
    if architecture == _ARCHITECTURE:
        raise InvalidModel(f"{header.path.name} is a projector: name the model that it belongs to")
    key = f"{architecture}.rope.dimension_sections"
    if architecture in NEED_PARTS and header.integers(key) is None:
        raise InvalidModel(
            f"{header.path.name} takes no rows of pictures: llama.cpp would end the process, since {key} is"
            " missing; take a GGUF of the vision model, such as GLM-4.6V"
        )
