"""Kernels for this host's processor: the library that llama.cpp has loaded, and what computes attention."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from stages.runtime.llama_libraries import kernels_folder, library_folder


def load_best_kernels(ggml: ctypes.CDLL) -> None:
    """Load the best kernels for this processor where llama.cpp was built with several.

    Args:
        ggml: libggml, or what depends on it.
    """
    folder = kernels_folder()
    if folder is None:
        return
    load = ggml.ggml_backend_load_all_from_path
    load.argtypes = [ctypes.c_char_p]
    load.restype = None
    load(os.fsencode(folder))


def loaded_kernels() -> ctypes.CDLL | None:
    """The processor's kernels that this process has loaded; None if they are in no library of their own."""
    folder = library_folder()
    # There may be copies, of which one is loaded, or a library for each generation of processors.
    for path in () if folder is None else sorted(folder.glob("*ggml-cpu*")):
        with suppress(OSError):
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
    return None


def attention_version(kernels: ctypes.CDLL | None) -> int:
    """Kernels of attention on this processor.

    0 is ggml's own kernel, whose bits for a lone row depend on threads and padding. Otherwise it is that of
    `stages/attention/`: its operations in hundreds, and the numbers in one of its vectors. Where that is
    equal, so are the bits.

    Args:
        kernels: Result of `loaded_kernels`.
    """
    function = getattr(kernels, "attention_rows_version", None)
    return 0 if function is None else int(function())


def attention_name(version: int) -> str:
    """Kernels of attention, for display.

    Args:
        version: See `attention_version`.
    """
    operations, width = divmod(version, 100)
    return f"spanmesh {operations}, {32 * width} bits" if version else "ggml"
