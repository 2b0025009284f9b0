"""What came of one kind of hostile input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mesh.bench.stress.memory import Growth

_MIB: Final = 2**20


@dataclass(frozen=True)
class FuzzReport:
    """One run of one kind.

    Attributes:
        kind: What was fed, such as `http`.
        seed: It was made from.
        num_cases: Inputs that were fed.
        outcomes: How often each answer came, by its name: an HTTP status, a gRPC code, `accepted`.
        num_crashes: Inputs after which the process under test was gone, or raised what nobody expected.
        num_hangs: Inputs without an answer in time.
        num_faults: Bad inputs that were blamed on the server: an HTTP 5xx, a gRPC `INTERNAL` or `UNKNOWN`.
        num_memory_samples: Of the process under test; 0 if each input had a process of its own, or if the run
            ended before it had warmed up.
        growth: Its memory after the warm-up and at the end; None if there were too few samples to tell.
        kept: Files with the first failing input of each sort.
        duration_s: Of the whole run.
    """

    kind: str
    seed: int
    num_cases: int
    outcomes: Mapping[str, int]
    num_crashes: int
    num_hangs: int
    num_faults: int
    num_memory_samples: int
    growth: Growth | None
    kept: tuple[Path, ...]
    duration_s: float

    @property
    def is_good(self) -> bool:
        """Whether nothing failed, and memory stayed flat as far as is known."""
        num_failures = self.num_crashes + self.num_hangs + self.num_faults
        return num_failures == 0 and (self.growth is None or self.growth.is_flat)


def as_dict(report: FuzzReport) -> dict[str, Any]:
    """For JSON."""
    growth = report.growth
    return {
        "kind": report.kind,
        "good": report.is_good,
        "seed": report.seed,
        "cases": report.num_cases,
        "outcomes": dict(report.outcomes),
        "crashes": report.num_crashes,
        "hangs": report.num_hangs,
        "faults": report.num_faults,
        "warm_bytes": None if growth is None else growth.first_bytes,
        "end_bytes": None if growth is None else growth.last_bytes,
        "growth_bytes": None if growth is None else growth.growth_bytes,
        "flat": None if growth is None else growth.is_flat,
        "kept": [str(path) for path in report.kept],
        "duration_s": round(report.duration_s, 1),
    }


def as_text(report: FuzzReport) -> str:
    """A few lines for a person."""
    outcomes = ", ".join(f"{name}: {count}" for name, count in sorted(report.outcomes.items()))
    verdict = "good" if report.is_good else "FAILED"
    failures = f"crashes {report.num_crashes}, hangs {report.num_hangs}, faults {report.num_faults}"
    lines = [
        f"{report.kind}: {report.num_cases} cases, seed {report.seed}, {report.duration_s:.0f} s: {verdict}",
        f"  {failures}",
        f"  memory: {_memory(report)}",
        f"  answers: {outcomes}",
        *(f"  kept: {path}" for path in report.kept),
    ]
    return "\n".join(lines)


def _memory(report: FuzzReport) -> str:
    """Before, after, and what that means."""
    growth = report.growth
    if not report.num_memory_samples:
        return "not judged: each input had a process of its own, or the run was too short"
    if growth is None:
        return f"{report.num_memory_samples} samples, too few to tell"
    verdict = "flat" if growth.is_flat else "GROWS"
    return (
        f"{growth.first_bytes / _MIB:.1f} MiB after the warm-up, {growth.last_bytes / _MIB:.1f} at the end, "
        f"{growth.growth_bytes / _MIB:+.1f} where {growth.allowed_bytes / _MIB:.1f} is allowed: {verdict}"
    )
