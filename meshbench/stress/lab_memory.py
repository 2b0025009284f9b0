"""Memory of a mesh's processes on lab hosts during a run, for checks and the report."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshbench.lab.memory_watch import ROLES
from meshbench.stress.checks import flatness_check, growth_by_process
from meshbench.stress.memory import footprints
from meshbench.stress.report import RoleMemory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mesh.placement.memory_estimate import StageSizes
    from mesh.status import MeshStatus
    from meshbench.lab.memory_watch import MemorySample, MemoryWatch, Role
    from meshbench.report_tools import Check
    from meshbench.stress.memory import Footprint


class LabMemory:
    """Samples of all processes, and what becomes of them.

    Args:
        watch: Takes the samples, from before the load to its end.
        sizes: Of the model's layers.
    """

    def __init__(self, watch: MemoryWatch, sizes: StageSizes) -> None:
        self._watch = watch
        self._sizes = sizes
        self._steady: list[list[MemorySample]] = []

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        """All so far."""
        return tuple(self._watch.samples)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no samples in the block: they must not slow one side of a comparison."""
        self._watch.is_paused = True
        try:
            yield
        finally:
            self._watch.is_paused = False

    def steady_checks(self, start_s: float, stop_s: float) -> list[Check]:
        """Check that memory was flat under a steady load; times are those of `time.perf_counter`."""
        samples = self._watch.between(start_s, stop_s)
        self._steady.append(samples)
        return [flatness_check(samples, role, stop_s - start_s) for role in ("stage", "coordinator", "join")]

    def footprints(self, status: MeshStatus) -> list[Footprint]:
        """Memory of every stage of the ring."""
        hosts = [int(stage.host.removeprefix("host")) for stage in status.stages]
        return footprints(status.stages, hosts, self._sizes, self.samples)

    def by_role(self) -> tuple[RoleMemory, ...]:
        """Memory by host and role, over all samples."""
        return _by_role(self.samples, self._steady)


def _by_role(
    samples: Sequence[MemorySample], steady: Sequence[Sequence[MemorySample]]
) -> tuple[RoleMemory, ...]:
    looks: dict[tuple[int, Role], dict[int, list[int]]] = {}
    for sample in samples:
        if sample.role != "other":
            by_look = looks.setdefault((sample.host, sample.role), {})
            by_look.setdefault(sample.look, []).append(sample.own_bytes)
    growths = [(role, growth_by_process(part, role)) for part in steady for role in ROLES]
    return tuple(
        RoleMemory(
            host=host,
            role=role,
            num_processes=max(map(len, by_look.values())),
            max_bytes=max(map(sum, by_look.values())),
            growth=tuple(
                growth for of, found in growths if of == role for where, growth in found if where == host
            ),
        )
        for (host, role), by_look in sorted(looks.items())
    )
