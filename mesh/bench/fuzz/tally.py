"""Counts outcomes while hostile input is fed, and keeps what failed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Literal

from mesh.bench.fuzz.report import FuzzReport
from mesh.bench.stress.memory import growth_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mesh.bench.fuzz.options import FuzzOptions

Failure = Literal["crash", "hang", "fault"]

# Of each sort of failure; after some they repeat themselves.
_MAX_KEPT: Final = 10


class Tally:
    """What has happened so far.

    Args:
        kind: Such as `http`; begins the names of kept files.
        options: What the user says.
        now_s: A steady clock, in seconds.
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

    def count(self, outcome: str) -> None:
        """One input was fed and answered so."""
        self.num_cases += 1
        self._outcomes[outcome] += 1

    def fail(self, failure: Failure, data: bytes, reason: str) -> None:
        """An input, counted already, did harm: keep it beside the reason, if it is one of the first."""
        self._failures[failure] += 1
        if self._failures[failure] <= _MAX_KEPT:
            path = self._options.output / f"{self._kind}-{failure}-{self._failures[failure]}.bin"
            path.write_bytes(data)
            path.with_suffix(".txt").write_text(f"case {self.num_cases}: {reason}\n")
            self._kept.append(path)

    def sample_memory(self, size_bytes: float) -> None:
        """What the process under test takes now. Some dozens of samples over a run are enough."""
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
        )
