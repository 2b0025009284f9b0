"""A full disk is told before it is met where that is possible, and in one line in any case."""

from __future__ import annotations

import errno
import shutil
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ModelError
from stages.units import format_size

if TYPE_CHECKING:
    from pathlib import Path

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def require_disk(path: Path, needed_bytes: int) -> None:
    """Refuse to begin a file that the disk has no room for.

    Args:
        path: Of the file; its folder must exist.
        needed_bytes: What is yet to be written.

    Raises:
        ModelError: If less is free.
    """
    if needed_bytes > shutil.disk_usage(path.parent).free:
        raise _no_room(path, needed_bytes)


def write_error(path: Path, error: OSError, needed_bytes: int | None = None) -> ModelError:
    """What a failed write means.

    Args:
        path: Of the file.
        error: The system's.
        needed_bytes: What was yet to be written, if that is known.
    """
    if error.errno in _FULL:
        return _no_room(path, needed_bytes)
    return ModelError(f"cannot write {path}: {error.strerror or error}")


def _no_room(path: Path, needed_bytes: int | None) -> ModelError:
    free = format_size(shutil.disk_usage(path.parent).free)
    needed = "" if needed_bytes is None else f"{format_size(needed_bytes)} are needed, "
    return ModelError(
        f"cannot write {path}: the disk is full: {needed}{free} are free there; make room, as with "
        "`mesh models prune`, or let XDG_CACHE_HOME name a folder on a larger disk"
    )
