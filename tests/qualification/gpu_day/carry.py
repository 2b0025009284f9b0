"""Folder to carry to a machine without a network: sources, pure packages and llama.cpp's libraries."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import stages
from spanmesh_proto.errors import ClusterError
from stages.runtime.llama_libraries import library_folder

if TYPE_CHECKING:
    from collections.abc import Iterable

_SOURCES: Final = ("mesh", "meshbench", "stages", "speculative", "tests/qualification")
_PROTO: Final = "proto/spanmesh_proto"
# What the machine must have: compiled for its Python.
THERE: Final = ("numpy", "grpc", "google")
# Parts of packages that are not imported.
_LEFT_OUT: Final = shutil.ignore_patterns("__pycache__", "*.gguf", "tests", "lib", "*.pyc")


def loaded_packages() -> dict[str, Path]:
    """Third-party packages and modules that this process has imported, by name; those of `THERE` left out."""
    found: dict[str, Path] = {}
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        file = getattr(sys.modules.get(top, module), "__file__", None)
        if file is None or "site-packages" not in file or top in THERE or top.startswith("__editable__"):
            continue
        path = Path(file)
        found[top] = path.parent if path.name == "__init__.py" else path
    return found


def carry(folder: Path, packages: Iterable[tuple[str, Path]] | None = None) -> None:
    """Write the folder; there, `python3 -m tests.qualification.gpu_day` runs from it.

    Args:
        folder: Where to; must not exist.
        packages: Names and paths of packages; those that this process has imported unless given.

    Raises:
        ClusterError: If the folder exists, or there are no libraries of llama.cpp.
    """
    if folder.exists():
        raise ClusterError(f"{folder} exists: name a folder that is to be made")
    libraries = library_folder()
    if libraries is None or not libraries.is_dir():
        raise ClusterError("llama.cpp's libraries are not here: make environment BACKEND=vulkan")
    root = Path(stages.__file__).parents[1]
    folder.mkdir(parents=True)
    for name in _SOURCES:
        shutil.copytree(root / name, folder / name, ignore=_LEFT_OUT)
    shutil.copy(root / "tests/__init__.py", folder / "tests")
    shutil.copytree(root / _PROTO, folder / "spanmesh_proto", ignore=_LEFT_OUT)
    for path in (folder / "stages").glob("_*.so"):
        # Called by ctypes, whatever Python it was compiled beside.
        path.rename(path.with_name(f"{path.name.partition('.')[0]}.so"))
    for name, path in loaded_packages().items() if packages is None else packages:
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=_LEFT_OUT)
        else:
            shutil.copy(path, folder / path.name)
    shutil.copytree(libraries, folder / "lib")
