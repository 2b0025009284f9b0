"""Modules in a working directory that end whatever imports them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

COMPLAINT: Final = "imported from the working directory"
# Of the standard library, of what is installed, and of this program. Ray's own start imports `secrets`.
_NAMES: Final = ("json", "struct", "multiprocessing", "pickle", "secrets", "numpy", "llama_cpp", "stages")


def write_hostile_modules(folder: Path) -> Path:
    """Make a folder with modules that end a program with `COMPLAINT`; returns the folder."""
    folder.mkdir()
    for name in _NAMES:
        (folder / f"{name}.py").write_text(f"raise SystemExit({COMPLAINT!r})\n")
    return folder
