"""Locations of llama.cpp's shared libraries, found without loading them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Final

# Names another folder for the libraries, in llama-cpp-python's words.
_FOLDER: Final = "LLAMA_CPP_LIB_PATH"
# Those that bring no device with memory of its own.
_PLAIN: Final = frozenset({"ggml", "ggml-base", "ggml-blas"})


def library_folder() -> Path | None:
    """Where llama-cpp-python finds llama.cpp's libraries; None if it is not installed."""
    named = os.environ.get(_FOLDER)
    if named is not None:
        return Path(named)
    spec = find_spec("llama_cpp")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "lib"


def may_have_layer_devices() -> bool:
    """Whether llama.cpp was built with anything but the processor's kernels; yes if its files do not tell."""
    folder = library_folder()
    names = (
        set()
        if folder is None
        else {path.name.removeprefix("lib").partition(".")[0] for path in folder.glob("*ggml*.*")}
    )
    # A processor may have several, one for each of its generations.
    special = {name for name in names - _PLAIN if name != "ggml-cpu" and not name.startswith("ggml-cpu-")}
    return "ggml-base" not in names or bool(special)
