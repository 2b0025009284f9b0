"""How much memory this host, and the control groups that this process runs in, leave free now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator


class _GroupFiles(NamedTuple):
    """Where one version of Linux control groups says what it allows."""

    limit: str
    used: str
    file_pages: tuple[str, ...]


_VERSION_1: Final = _GroupFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_VERSION_2: Final = _GroupFiles("memory.max", "memory.current", ("inactive_file", "active_file"))
_ROOT: Final = Path("/")


def free_memory_bytes() -> int:
    """What new processes may take before the host swaps or a control group's limit is met."""
    return min([psutil.virtual_memory().available, *free_in_groups_bytes()])


def free_in_groups_bytes(root: Path = _ROOT) -> list[int]:
    """What each control group with a limit leaves free, from this process's own upwards.

    A container's limit is one of these; the host's own memory says nothing of it. Pages of files count as
    free: the kernel drops them before it kills anybody.

    Args:
        root: Of the file system that holds `proc` and `sys`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    free = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        files = _VERSION_1 if controllers else _VERSION_2
        free += [left for folder in _upwards(mount, path) if (left := _free_in(folder, files)) is not None]
    return free


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder and all above it. Inside a container the first may not be visible."""
    folder = mount / path.lstrip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _free_in(folder: Path, files: _GroupFiles) -> int | None:
    try:
        limit = (folder / files.limit).read_text().strip()
        used_bytes = int((folder / files.used).read_text())
        stat = (folder / "memory.stat").read_text()
    except OSError:
        return None
    if limit == "max":
        return None
    pages = dict(line.split() for line in stat.splitlines())
    dropped_bytes = sum(int(pages.get(name, 0)) for name in files.file_pages)
    return max(0, int(limit) - used_bytes + dropped_bytes)
