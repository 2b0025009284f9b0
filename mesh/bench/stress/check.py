"""What must hold of a run. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.bench.stress.ground import open_sessions
from mesh.bench.stress.growth import growth_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.bench.stress.footprint import Footprint
    from mesh.bench.stress.growth import Growth
    from mesh.bench.stress.step import Step
    from mesh.lab.memory_watch import MemorySample

_MIB: Final = 2**20
# In a shorter time nothing can be told from an allocator's ups and downs.
LEAST_STEADY_S: Final = 30.0


@dataclass(frozen=True)
class Check:
    """Something that must hold.

    Attributes:
        name: What.
        holds: Whether it does; None if the run was too short to say.
        detail: The figures.
    """

    name: str
    holds: bool | None
    detail: str


def answer_checks(steps: Sequence[Step], *, is_exact: bool) -> list[Check]:
    """Of every answer."""
    found = []
    for step in steps:
        judgement = step.judgement
        kinds = ", ".join(f"{count} {kind}" for kind, count in judgement.by_kind.items())
        examples = "; ".join(f"{problem.request}: {problem.detail}" for problem in judgement.problems[:3])
        forks = f"{judgement.num_forks} of {judgement.num_compared} texts other than alone"
        if judgement.num_hung_up:
            forks += f", {judgement.num_hung_up} clients hung up"
        promise = "every answer sound and byte-equal to alone" if is_exact else "every answer sound"
        found.append(
            Check(
                f"{promise}, {step.concurrency} at once",
                not judgement.problems,
                f"{judgement.num_answers} answers, {kinds or 'no problem'}, {forks}"
                + (f" ({examples})" if examples else ""),
            )
        )
    return found


def leak_check(status: dict[str, Any]) -> Check:
    """Nobody asks, so nobody may hold a session."""
    sessions = status["sessions"]
    at_stages = [stage.get("open_sessions") for stage in status["stages"]]
    said = ", ".join("not told" if count is None else str(count) for count in at_stages)
    return Check(
        "no session left when idle",
        open_sessions(status) == 0,
        f"{sessions['running']} running, {sessions['waiting']} waiting, open at the stages: {said}",
    )


def footprint_checks(footprints: Sequence[Footprint]) -> list[Check]:
    """Of every stage's memory."""
    return [
        Check(
            f"memory of stage {each.index} within weights + KV + 300 MB",
            each.is_within,
            f"{each.process_bytes / _MIB:.0f} MiB at most, {each.weight_bytes / _MIB:.0f} weights + "
            f"{each.cache_bytes / _MIB:.0f} KV; {each.host_bytes / _MIB:.0f} with Ray and all on its host",
        )
        for each in footprints
    ]


def flatness_check(samples: Sequence[MemorySample], role: str, duration_s: float) -> Check:
    """Of all processes of a role together, under a steady load.

    Args:
        samples: Of the time of that load.
        role: See `memory_watch.Role`.
        duration_s: Of that load.
    """
    name = f"memory of {role} flat after warm-up"
    growths = growth_by_process(samples, role)
    if duration_s < LEAST_STEADY_S or not growths:
        return Check(name, None, f"{duration_s:.0f} s of steady load are too short to say")
    details = [
        f"host{host}: {growth.first_bytes / _MIB:.1f} to {growth.last_bytes / _MIB:.1f} MiB, most "
        f"{growth.max_bytes / _MIB:.1f}, {growth.slope_bytes_per_hour / _MIB:+.1f} MiB/h"
        for host, growth in growths
    ]
    return Check(name, all(growth.is_flat for _, growth in growths), "; ".join(details))


def growth_by_process(samples: Sequence[MemorySample], role: str) -> list[tuple[int, Growth]]:
    """Host number and growth of each process of a role that was there long enough."""
    by_process: dict[tuple[int, int], list[MemorySample]] = {}
    for sample in samples:
        if sample.role == role:
            by_process.setdefault((sample.host, sample.pid), []).append(sample)
    found = []
    for (host, _pid), own in sorted(by_process.items()):
        growth = growth_of([each.at_s for each in own], [each.own_bytes for each in own])
        if growth is not None:
            found.append((host, growth))
    return found
