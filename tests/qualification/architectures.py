"""llama.cpp's list of architectures, and why there is no tiny model of some."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import MeshError
from stages.slicing.architectures.cutting_rules import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_LIST: Final = "src/llama-arch.cpp"
_ENTRY: Final = re.compile(r'\{ LLM_ARCH_(\w+),\s*"([^"]+)"')
_NONE: Final = "UNKNOWN"
_VECTORS: Final = "makes vectors of texts: `mesh load --embeddings` serves it whole, on one host"
_DRAFTER: Final = "drafts for another model, and is no model of its own: see docs/speculation.md"

WITHOUT_MODEL: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "bert",
            "eurobert",
            "gemma-embedding",
            "jina-bert-v2",
            "jina-bert-v3",
            "llama-embed",
            "modern-bert",
            "neo-bert",
            "nomic-bert",
            "nomic-bert-moe",
        ),
        _VECTORS,
    ),
    **dict.fromkeys(("dflash", "eagle3", "gemma4-assistant"), _DRAFTER),
    **{
        name: f"cannot be served: {FAMILIES[name].not_served}"
        for name in ("clip", "gptj", "t5", "t5encoder", "wavtokenizer-dec")
    },
}
"""By architecture."""


def listed_architectures(source: Path) -> tuple[str, ...]:
    """Names of llama.cpp's list, in alphabetical order.

    Args:
        source: Folder of llama.cpp's source.

    Raises:
        MeshError: If there is no such list.
    """
    try:
        code = (source / _LIST).read_text(encoding="utf-8")
    except OSError as error:
        raise MeshError(
            f"{source / _LIST} cannot be read: {error.strerror}; name llama.cpp's source"
        ) from None
    names = sorted(name for member, name in _ENTRY.findall(code) if member != _NONE)
    if not names:
        raise MeshError(f"{source / _LIST} has no list of architectures as it was known")
    return tuple(names)
