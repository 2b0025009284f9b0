"""Limits of this process: its control groups on Linux, and the processors that it may use."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path("/")
_MOUNT: Final = "sys/fs/cgroup"
# Both in microseconds: time that a group may compute in each period, all processors together.
_QUOTA_V1: Final = "cpu.cfs_quota_us"
_PERIOD_V1: Final = "cpu.cfs_period_us"
_MAX_V2: Final = "cpu.max"
_NO_QUOTA: Final = frozenset({"max", "-1"})
_CPUINFO: Final = Path("/proc/cpuinfo")
# The same elsewhere, as on macOS.
_NAME_COMMAND: Final = ("sysctl", "-n", "machdep.cpu.brand_string")


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


def num_usable(root: Path = ROOT) -> int:
    """Threads that can compute at once in this process, 1 at least.

    A quota counts rounded down: threads beyond it would use up the time of the others, and all of them, which
    wait for one another, would stand still until the next period.

    Args:
        root: Of the file system that holds the files of control groups.
    """
    quota = processor_quota(root)
    return num_bound() if quota is None else max(1, min(num_bound(), int(quota)))


def num_bound() -> int:
    """Logical processors that this process may run on; all of them where the system keeps no such set."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_quota(root: Path = ROOT) -> float | None:
    """Processors whose time this process and its neighbours in a control group may use together.

    It is the smallest of all groups, from this process's own upwards; a container or a service has one. None
    without any.

    Args:
        root: Of the file system that holds `proc` and `sys`.
    """
    quotas = [quota for group in groups_with("cpu", root) if (quota := _quota_of(group)) is not None]
    return min(quotas, default=None)


def _quota_of(group: ControlGroup) -> float | None:
    if group.version == 1:
        words = [group.read(_QUOTA_V1), group.read(_PERIOD_V1)]
    else:
        words = [*(group.read(_MAX_V2) or "").split(), None, None]
    quota_us, period_us = words[:2]
    if quota_us is None or period_us is None or quota_us in _NO_QUOTA:
        return None
    return int(quota_us) / int(period_us)


def processor_name() -> str:
    """Name of this machine's processor, or of its architecture."""
    return _listed_name() or _asked_name() or platform.machine()


def _listed_name() -> str:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _asked_name() -> str:
    with suppress(OSError):
        done = subprocess.run(_NAME_COMMAND, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return ""
