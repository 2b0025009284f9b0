"""Shared libraries of llama.cpp, found without loading them, and the kernels for this host's processor."""

from __future__ import annotations

import ctypes
import hashlib
import os
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# Variable of llama-cpp-python for another folder of the libraries.
_FOLDER: Final = "LLAMA_CPP_LIB_PATH"
# Libraries without a device that has memory of its own.
_PLAIN: Final = frozenset({"ggml", "ggml-base", "ggml-blas"})


def library_folder() -> Path | None:
    """Folder of llama.cpp's libraries in llama-cpp-python; None if it is not installed."""
    named = os.environ.get(_FOLDER)
    if named is not None:
        return Path(named)
    spec = find_spec("llama_cpp")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "lib"


def is_named_folder() -> bool:
    """Whether the folder is another one than that of llama-cpp-python's own build."""
    return _FOLDER in os.environ


def kernels_folder() -> Path | None:
    """Folder of the processor's kernels where there is a library for each generation; None for one library.

    llama.cpp loads none of several by itself.
    """
    folder = library_folder()
    return folder if folder is not None and any(folder.glob("*ggml-cpu-*")) else None


def gpu_backends() -> tuple[str, ...] | None:
    """Backends that llama.cpp was built with besides the processor's, such as `vulkan`; None if unknown.

    Its files show them, unless it is one library with everything in it.
    """
    folder = library_folder()
    names = (
        set()
        if folder is None
        else {path.name.removeprefix("lib").partition(".")[0] for path in folder.glob("*ggml*.*")}
    )
    if "ggml-base" not in names:
        return None
    # There may be several for the processor, one for each of its generations.
    special = {name for name in names - _PLAIN if name != "ggml-cpu" and not name.startswith("ggml-cpu-")}
    return tuple(sorted(name.removeprefix("ggml-") for name in special))


def may_have_layer_devices() -> bool:
    """Whether llama.cpp was built with other backends than the processor's; True if its files do not show."""
    return gpu_backends() != ()


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


def kernels_sha256(kernels: ctypes.CDLL | None) -> str:
    """Hash of the file with the processor's kernels, hex: of another build, they may round otherwise.

    Args:
        kernels: Result of `loaded_kernels`; the hash of None is empty.
    """
    if kernels is None:
        return ""
    path = Path(kernels._name)  # noqa: SLF001 - there is no public name of it
    return hashlib.sha256(path.read_bytes()).hexdigest()


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


def has_tiled_products(kernels: ctypes.CDLL | None) -> bool:
    """Whether kernels have llamafile's matrix products, of `stages/products/`, which are off at first.

    Args:
        kernels: Result of `loaded_kernels`.
    """
    return getattr(kernels, "tiled_products_enable", None) is not None


@contextmanager
def tiled_products(kernels: ctypes.CDLL | None) -> Iterator[None]:
    """Compute with llamafile's matrix products in the block, where the kernels have them.

    The results have other bits, so nothing else is to compute in this process meanwhile.

    Args:
        kernels: Result of `loaded_kernels`.
    """
    if kernels is None or not has_tiled_products(kernels):
        yield
        return
    kernels.tiled_products_enable(1)
    try:
        yield
    finally:
        kernels.tiled_products_enable(0)
