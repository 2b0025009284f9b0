"""Options, counts and report of `mesh bench fuzz`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from meshbench.stress.memory import growth_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from meshbench.stress.memory import Growth

_MIB: Final = 2**20
# Of each sort of failure; after some they repeat themselves.
_MAX_KEPT: Final = 10

Failure = Literal["crash", "hang", "fault"]


@dataclass(frozen=True)
class FuzzOptions:
    """One run of one kind."""

    num_cases: int
    """How many inputs."""
    seed: int
    """Of all randomness: the same seed makes the same inputs in the same order."""
    model: Path
    """A GGUF file, for what serves one."""
    output: Path
    """Folder for failing inputs and the servers' logs; it exists."""


@dataclass(frozen=True)
class FuzzReport:
    """One run of one kind."""

    kind: str
    """What was fed, such as `http`."""
    seed: int
    """It was made from."""
    num_cases: int
    """Inputs that were fed."""
    outcomes: Mapping[str, int]
    """Number of answers by name: an HTTP status, a gRPC code, `accepted`."""
    num_crashes: int
    """Inputs after which the process under test was gone, or raised an unexpected error."""
    num_hangs: int
    """Inputs without an answer in time."""
    num_faults: int
    """Bad inputs that were blamed on the server: an HTTP 5xx, a gRPC `INTERNAL` or `UNKNOWN`."""
    num_memory_samples: int
    """Of the process under test; 0 if each input had a process of its own, or if the run ended before it had
    warmed up."""
    growth: Growth | None
    """Its memory after the warm-up and at the end; None if there were too few samples to tell."""
    kept: tuple[Path, ...]
    """Files with the first failing input of each sort."""
    duration_s: float
    """Of the whole run."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured beside, by name with its unit."""

    @property
    def is_good(self) -> bool:
        """Whether nothing failed, and memory stayed flat as far as is known."""
        num_failures = self.num_crashes + self.num_hangs + self.num_faults
        return num_failures == 0 and (self.growth is None or self.growth.is_flat)


class Tally:
    """What has happened so far.

    Args:
        kind: Such as `http`; begins the names of kept files.
        options: Options of the run.
        now_s: A steady clock, in seconds.

    Attributes:
        num_cases: Inputs that were counted.
        figures: For the report.
    """

    def __init__(self, kind: str, options: FuzzOptions, now_s: Callable[[], float]) -> None:
        self._kind = kind
        self._options = options
        self._now_s = now_s
        self._begin_s = now_s()
        self._outcomes: Counter[str] = Counter()
        self._failures: Counter[Failure] = Counter()
        self._times_s: list[float] = []
        self._sizes_bytes: list[float] = []
        self._kept: list[Path] = []
        self.num_cases = 0
        self.figures: dict[str, float] = {}

    def count(self, outcome: str) -> None:
        """One input was fed and answered so."""
        self.num_cases += 1
        self._outcomes[outcome] += 1

    def fail(self, failure: Failure, data: bytes, reason: str) -> None:
        """Record a counted input as harmful: keep it with the reason, if it is one of the first."""
        self._failures[failure] += 1
        if self._failures[failure] <= _MAX_KEPT:
            path = self._options.output / f"{self._kind}-{failure}-{self._failures[failure]}.bin"
            path.write_bytes(data)
            path.with_suffix(".txt").write_text(f"case {self.num_cases}: {reason}\n")
            self._kept.append(path)

    def sample_memory(self, size_bytes: float) -> None:
        """Memory of the process under test. Some dozens of samples over a run are enough."""
        self._times_s.append(self._now_s())
        self._sizes_bytes.append(size_bytes)

    def report(self) -> FuzzReport:
        """The run so far."""
        return FuzzReport(
            kind=self._kind,
            seed=self._options.seed,
            num_cases=self.num_cases,
            outcomes=dict(self._outcomes),
            num_crashes=self._failures["crash"],
            num_hangs=self._failures["hang"],
            num_faults=self._failures["fault"],
            num_memory_samples=len(self._sizes_bytes),
            growth=growth_of(self._times_s, self._sizes_bytes),
            kept=tuple(self._kept),
            duration_s=self._now_s() - self._begin_s,
            figures=dict(self.figures),
        )


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
        "figures": {name: _rounded(value) for name, value in report.figures.items()},
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
        *(f"  {name}: {_rounded(value):g}" for name, value in report.figures.items()),
        *(f"  kept: {path}" for path in report.kept),
    ]
    return "\n".join(lines)


def _rounded(value: float) -> float:
    """To three digits behind the point, which counts do not need."""
    return round(value, 3)


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
