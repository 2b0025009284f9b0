"""Control groups of Linux that this process is in: their folders, from its own upwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path("/")
_MOUNT: Final = "sys/fs/cgroup"


@dataclass(frozen=True)
class ControlGroup:
    """A group that limits this process."""

    folder: Path
    """Folder of its files; inside a container that of an outer group may be missing."""
    version: int
    """Version of Linux control groups, which decides the names of these files: 1 or 2."""

    def read(self, name: str) -> str | None:
        """Content of a file, stripped; None if it is missing or unreadable."""
        try:
            return (self.folder / name).read_text().strip()
        except OSError:
            return None


def groups_with(controller: str, root: Path = ROOT) -> Iterator[ControlGroup]:
    """Groups that may limit what a controller counts, such as `memory`: those of this process and all above.

    Args:
        controller: Name of the controller.
        root: Of the file system that holds `proc` and `sys`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = _mount(root, controllers, controller)
        yield from (ControlGroup(folder, 1 if controllers else 2) for folder in _upwards(mount, path))


def _mount(root: Path, controllers: str, controller: str) -> Path:
    """Mount points of hierarchies: those of the first version by the names of their controllers."""
    top = root / _MOUNT
    if not controllers:
        # Beside hierarchies of the first version the second has a folder of its own.
        beside = top / "unified"
        return beside if beside.is_dir() else top
    alone = top / controller
    return alone if alone.is_dir() else top / controllers


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    folder = mount / path.lstrip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount
