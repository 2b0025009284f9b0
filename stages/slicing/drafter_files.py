"""Drafter files: what tells, in a header, a file that drafts for another model from a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import InvalidModel
from stages.slicing.tensor_names import count_prediction_layers, layer_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stages.gguf import GgufHeader

_BLOCKS: Final = "a block drafter of the DFlash family"
_ASSISTANT: Final = "an assistant of Gemma 4"
# By `general.architecture`.
_LABELS: Final[Mapping[str, str]] = {
    "eagle3": "an EAGLE-3 drafter",
    "dflash": _BLOCKS,
    "dspark": _BLOCKS,
    "gemma4-assistant": _ASSISTANT,
    "gemma4_assistant": _ASSISTANT,
}


def drafter_label(header: GgufHeader) -> str:
    """What a file is that drafts for another model, as a noun phrase; empty for other and for damaged files.

    A small model that drafts is a model to its header.

    Args:
        header: Header of the file.
    """
    label = _LABELS.get(header.architecture)
    if label is not None:
        return label
    try:
        has_head = count_prediction_layers(header) > 0
    except InvalidModel:
        return ""
    layers = {layer_of(name) for name in header.tensors} - {None}
    return "a head for multi-token prediction" if has_head and layers and 0 not in layers else ""
