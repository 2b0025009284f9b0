"""A run and the folder that says it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mesh.bench.chaos.lines import as_markdown
from mesh.bench.chaos.summary import by_kind

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.bench.chaos.scenario import Scenario
    from mesh.bench.stress.checks import Check, Line


@dataclass(frozen=True)
class Report:
    """A run, worked out.

    Attributes:
        circumstances: How it was made, by name.
        scenarios: What was tried.
        checks: What must hold besides.
        failures: What could not be done, and why.
    """

    circumstances: dict[str, Any]
    scenarios: tuple[Scenario, ...]
    checks: tuple[Check, ...]
    failures: tuple[str, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """The acceptance table, of all scenarios."""
        return tuple(line for scenario in self.scenarios for line in scenario.lines)

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost and nothing failed.

        Where a bound is nought, that is a promise. A pause that is too long is a figure.
        """
        return (
            not any((self.failures, *(scenario.failures for scenario in self.scenarios)))
            and all(check.holds is not False for check in self.checks)
            and all(line.verdict != "missed" for line in self.lines if line.wanted == 0)
            and all(not scenario.problems for scenario in self.scenarios)
        )


def as_dict(report: Report) -> dict[str, Any]:
    """For JSON."""
    return {
        "circumstances": report.circumstances,
        "good": report.is_good,
        "lines": [{**asdict(line), "verdict": line.verdict} for line in report.lines],
        "checks": [asdict(check) for check in report.checks],
        "scenarios": [
            {
                "name": scenario.name,
                "kinds": [asdict(each) for each in by_kind(scenario.repairs)],
                "repairs": [asdict(repair) for repair in scenario.repairs],
                "problems": [asdict(problem) for problem in scenario.problems],
                "failures": list(scenario.failures),
            }
            for scenario in report.scenarios
        ],
        "failures": list(report.failures),
    }


def as_json(report: Report) -> str:
    """The report for programs."""
    return json.dumps(as_dict(report), indent=1, ensure_ascii=False, allow_nan=False)


def write_report(report: Report, folder: Path) -> None:
    """Write `report.md` and `report.json`.

    Args:
        report: What to say.
        folder: Made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(as_markdown(report), encoding="utf-8")
    (folder / "report.json").write_text(as_json(report) + "\n", encoding="utf-8")
