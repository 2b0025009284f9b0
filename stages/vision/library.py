"""libmtmd, llama.cpp's library for pictures: its file beside the other libraries, and its binding."""

from __future__ import annotations

import functools
import hashlib
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from spanmesh_proto.errors import ClusterError
from stages.runtime.llama_libraries import gpu_backends, is_named_folder, library_folder

if TYPE_CHECKING:
    from pathlib import Path

# Variable of llama-cpp-python for the folder of libmtmd, which does not follow that of the other libraries.
_FOLDER: Final = "MTMD_CPP_LIB"
_NAMES: Final = ("libmtmd.so", "libmtmd.dylib")


def mtmd_path() -> Path:
    """File of libmtmd for this process: in the folder of the other libraries, since it needs just these.

    Raises:
        ClusterError: If it is not there; with the command that makes it.
    """
    folder = library_folder()
    if folder is None:
        raise ClusterError("llama-cpp-python is not installed: make environment")
    path = next((folder / name for name in _NAMES if (folder / name).is_file()), None)
    if path is None:
        backends = gpu_backends() if is_named_folder() else None
        command = f"make pictures BACKEND={backends[0]}" if backends else "make pictures"
        raise ClusterError(
            f"llama.cpp's library for pictures, libmtmd, is not in {folder}: in a checkout of spanmesh,"
            f" `{command}` makes it in a minute; wheels of `make wheels` have it",
            param="--mmproj",
        )
    return path


@functools.cache
def load_mtmd() -> Any:
    """llama-cpp-python's binding of libmtmd, `llama_cpp.mtmd_cpp`, with the library of `mtmd_path`.

    Raises:
        ClusterError: If it is missing, or does not load.
    """
    path = mtmd_path()
    os.environ[_FOLDER] = str(path.parent)
    try:
        return import_module("llama_cpp.mtmd_cpp")
    except (OSError, RuntimeError, AttributeError) as error:
        raise ClusterError(
            f"{path} does not load ({error}): it is of another version of llama.cpp or for another kind of"
            " host; make it again: make pictures",
            param="--mmproj",
        ) from error


@functools.cache
def mtmd_build() -> bytes:
    """SHA-256 of libmtmd's file: rows of another build may differ.

    Raises:
        ClusterError: If it is missing.
    """
    with mtmd_path().open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
