"""Tiny models with float32 weights, for comparisons of a device with the processor.

Of quantised products the processor rounds both factors and a device only one, which random weights amplify.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path


def write_float(name: str, path: Path) -> Path:
    """Write the tiny model of a family, or of a plain architecture."""
    if name in TINY_FAMILIES:
        return TINY_FAMILIES[name].write(path, is_float=True)
    return TinyModel(name, is_float=True).write(path)
