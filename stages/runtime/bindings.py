"""llama-cpp-python's bindings, without its high-level class.

Importing the package runs its `__init__`, which loads that class with chat formats, caches and a template
engine: up to 6 MB and 40 ms of each process, of which spanmesh uses nothing. Other modules of the package can
still be imported by their names, such as `llama_cpp.llama`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec

if (_spec := find_spec("llama_cpp")) is not None and "llama_cpp" not in sys.modules:
    _package = sys.modules["llama_cpp"] = module_from_spec(_spec)
    try:
        _names = vars(import_module("llama_cpp.llama_cpp"))
    except BaseException:
        # Without its library: a half of the package would fail elsewhere, and for another reason.
        del sys.modules["llama_cpp"]
        raise
    vars(_package).update({name: value for name, value in _names.items() if not name.startswith("__")})
    # It takes llama.cpp's log as it is imported: now, not after the log was routed elsewhere.
    import_module("llama_cpp._logger")

import llama_cpp

__all__ = ["llama_cpp"]
