"""What one scenario came to. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mesh.bench.chaos.repair import Repair
    from mesh.bench.stress.checks import Line, Problem

INTERRUPTED: Final = "interrupted: what was to come after this is missing"


@dataclass(frozen=True)
class Scenario:
    """One of `options.SCENARIOS`.

    Attributes:
        name: Which.
        lines: Of the acceptance table.
        repairs: What was harmed.
        problems: Of streams.
        failures: Why it ended before it was through; empty if it was.
    """

    name: str
    lines: tuple[Line, ...]
    repairs: tuple[Repair, ...] = ()
    problems: tuple[Problem, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def is_interrupted(self) -> bool:
        """Whether somebody lost patience: then nothing more is tried."""
        return INTERRUPTED in self.failures
