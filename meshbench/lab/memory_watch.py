"""Memory of all processes of a mesh by role, sampled."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from meshbench.lab.network import Lab

# Roles of a mesh's processes.
ROLES: Final[tuple[Role, ...]] = ("stage", "coordinator", "join", "ray")
# Ray renames a worker after its actor.
_STAGE_TITLES: Final = ("ray::StageActor", "ray::EmbeddingActor")
_RAY_MARKS: Final = ("ray::", "raylet", "gcs_server", "ray/_private", "ray_child", "/ray/")
_KIB: Final = 1024

Role = Literal["stage", "coordinator", "join", "ray", "other"]


@dataclass(frozen=True)
class MemorySample:
    """Memory of one process at one time."""

    look: int
    """Number of the sample, from 0, common to all processes."""
    at_s: float
    """Time of `time.perf_counter`, seconds."""
    host: int
    """Index of its lab host."""
    pid: int
    """Its id in the outer namespace."""
    role: Role
    """Its role."""
    rss_bytes: int
    """Resident memory; shared pages count for each process."""
    pss_bytes: int | None
    """Proportional resident memory; None if the kernel does not report it."""

    @property
    def own_bytes(self) -> int:
        """The proportional memory if known, else the resident one."""
        return self.rss_bytes if self.pss_bytes is None else self.pss_bytes


class MemoryWatch:
    """Samples every process of every host during the block.

    A sample takes some tens of milliseconds of a core: the kernel walks through all pages of every process.

    Args:
        lab: The lab.
        interval_s: Interval of the samples, in seconds.

    Attributes:
        samples: Samples so far.
        is_paused: While set, no samples are taken.
    """

    def __init__(self, lab: Lab, interval_s: float) -> None:
        self._lab = lab
        self._interval_s = interval_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)
        self._roles: dict[int, Role] = {}
        self.samples: list[MemorySample] = []
        self.is_paused = False

    def __enter__(self) -> Self:
        """Begin sampling."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End sampling."""
        self._is_over.set()
        self._thread.join()

    def between(self, start_s: float, stop_s: float) -> list[MemorySample]:
        """Samples between two times of `time.perf_counter`."""
        return [sample for sample in tuple(self.samples) if start_s <= sample.at_s <= stop_s]

    def _watch(self) -> None:
        for look in itertools.count():
            if not self.is_paused:
                self._look(look)
            if self._is_over.wait(self._interval_s):
                return

    def _look(self, look: int) -> None:
        for host in range(self._lab.num_hosts):
            for pid in self._lab.pids(host):
                # A process may end during the measurement.
                with suppress(OSError):
                    self._look_at(look, host, pid)

    def _look_at(self, look: int, host: int, pid: int) -> None:
        home = Path(f"/proc/{pid}")
        role = self._roles.get(pid)
        if role is None or role == "ray":
            # Ray starts workers before it gives them an actor and a name.
            argv = (home / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            role = self._roles[pid] = role_of([word.decode(errors="replace") for word in argv])
        sums = _sums(home / "smaps_rollup")
        rss_kib = sums.get("Rss")
        if rss_kib is None:
            return
        pss_kib = sums.get("Pss")
        pss_bytes = None if pss_kib is None else pss_kib * _KIB
        self.samples.append(
            MemorySample(look, time.perf_counter(), host, pid, role, rss_kib * _KIB, pss_bytes)
        )


def role_of(argv: Sequence[str]) -> Role:
    """Role of a process in the mesh.

    Returns:
        `stage` for an actor with one, or with an embedding model; `coordinator` for `mesh serve`, `join` for
        `mesh join`, `ray` for Ray's own processes, `other` for the rest.
    """
    line = " ".join(argv)
    if line.startswith(_STAGE_TITLES):
        return "stage"
    if any(mark in line for mark in _RAY_MARKS):
        return "ray"
    words = [word.rpartition("/")[2] for word in argv]
    commands = set(pairwise(words))
    if ("mesh", "serve") in commands:
        return "coordinator"
    return "join" if ("mesh", "join") in commands else "other"


def _sums(path: Path) -> dict[str, int]:
    """The kernel's sums over all mappings of a process, in KiB; see proc(5)."""
    found: dict[str, int] = {}
    for line in path.read_text(encoding="ascii", errors="replace").splitlines()[1:]:
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0])
    return found
