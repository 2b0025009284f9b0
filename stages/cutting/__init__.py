"""Cutting a GGUF into stage files, each an ordinary smaller GGUF that unmodified llama.cpp loads.

A name is imported when it is asked for: a host that only loads stage files does without what cuts them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stages.certification.isolated import cut_stage
    from stages.cutting.cache import StageCache, StageFile
    from stages.slicing.model_facts import ModelFacts, read_model_facts

__all__ = ["ModelFacts", "StageCache", "StageFile", "cut_stage", "read_model_facts"]

_MODULES: Final = {
    "ModelFacts": "facts",
    "StageCache": "cache",
    "StageFile": "cache",
    "cut_stage": "cut",
    "read_model_facts": "facts",
}


def __getattr__(name: str) -> Any:
    """See PEP 562."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
