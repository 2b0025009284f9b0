"""llama.cpp's list of architectures, and why there is no tiny model of some."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import MeshError

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
    "clip": "llama.cpp can quantise these files, no more",
    "gptj": "llama.cpp has the name only",
    "t5": "cannot be served: an encoder-decoder model reads all of its input before it answers",
    "t5encoder": "is an encoder only: it writes no text, and llama.cpp does not pool its rows to a vector",
    "wavtokenizer-dec": "makes sound of codes, not text",
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
