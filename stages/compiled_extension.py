"""Compiled extensions: C functions that the installation has compiled, called by ctypes."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Final

# For warnings of callers that go on without the extension.
REMEDY: Final = "install spanmesh from a wheel, or with pip on a host with a C compiler"


@functools.cache
def load_extension(name: str) -> ctypes.CDLL:
    """The library of an extension module in `pyproject.toml`, such as `stages._stop_tap`.

    Raises:
        ImportError: If there is none, as in a plain copy of the sources, or without a C compiler.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(f"{name} was not compiled")
    try:
        return ctypes.CDLL(spec.origin)
    except OSError as error:
        raise ImportError(f"{spec.origin}: {error}") from error
