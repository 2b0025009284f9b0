"""Report of `mesh bench chaos`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from meshbench.chaos.faults import MEANING
from meshbench.chaos.results import by_kind
from meshbench.report_tools import (
    Check,
    Line,
    checks_table,
    checks_text,
    conditions_text,
    json_text,
    lines_table,
    lines_text,
    markdown_page,
    markdown_table,
    number,
    text_page,
    write_files,
)

if TYPE_CHECKING:
    from pathlib import Path

    from meshbench.chaos.results import Repair, Scenario

_KIND_HEADS: Final = (
    "fault",
    "times",
    "warm",
    "client's pause p50",
    "worst",
    "silence, worst",
    "repair p50",
    "all back p50",
    "new request, worst",
    "not whole",
)
_REPAIR_HEADS: Final = (
    "",
    "at",
    "fault",
    "host",
    "held",
    "clients' pauses",
    "repair",
    "all back",
    "new request",
    "reported by the head",
)
_MAX_PROBLEMS: Final = 20
_MAX_WORDS_CHARS: Final = 240


@dataclass(frozen=True)
class Report:
    """A run, worked out.

    Attributes:
        conditions: How it was made, by name.
        scenarios: Scenarios of the run.
        checks: Further checks.
        failures: What could not be done, and why.
        compared: Pauses over those of another checkout.
    """

    conditions: dict[str, Any]
    scenarios: tuple[Scenario, ...]
    checks: tuple[Check, ...]
    failures: tuple[str, ...]
    compared: tuple[Line, ...] = ()

    @property
    def lines(self) -> tuple[Line, ...]:
        """The acceptance table, of all scenarios."""
        return (*(line for scenario in self.scenarios for line in scenario.lines), *self.compared)

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost and nothing failed.

        A bound of zero is a promise; a long pause is a figure only.
        """
        return (
            not any((self.failures, *(scenario.failures for scenario in self.scenarios)))
            and all(check.holds is not False for check in self.checks)
            and all(line.verdict != "missed" for line in self.lines if line.wanted == 0)
            and all(not scenario.problems for scenario in self.scenarios)
        )


def as_markdown(report: Report) -> str:
    """The whole page."""
    sections = [
        ("# Faults in a mesh while clients read", conditions_text(report.conditions)),
        ("## Acceptance", lines_table(report.lines)),
        ("## Further checks", checks_table(report.checks)),
        ("## Not done", "\n".join(f"- {failure}" for failure in _failures(report))),
    ]
    for scenario in report.scenarios:
        kinds = [
            (
                MEANING[each.kind],
                str(each.count),
                str(each.num_warm),
                number(each.median_pause_s),
                number(each.worst_pause_s),
                number(each.worst_silence_s),
                number(each.median_repair_s),
                number(each.median_whole_s),
                number(each.worst_newcomer_s),
                str(each.num_not_whole),
            )
            for each in by_kind(scenario.repairs)
        ]
        repairs = [_repair(repair) for repair in scenario.repairs]
        sections += [
            (f"## Scenario `{scenario.name}` by kind; times in s", markdown_table(_KIND_HEADS, kinds)),
            (f"## Scenario `{scenario.name}`, one by one", markdown_table(_REPAIR_HEADS, repairs)),
            (f"## Scenario `{scenario.name}`: bad streams", _problems(scenario)),
        ]
    return markdown_page(sections)


def as_text(report: Report) -> str:
    """For a terminal."""
    parts = [
        lines_text(report.lines),
        checks_text(report.checks),
        "\n".join(f"not done: {failure}" for failure in _failures(report)),
        "\n".join(
            f"bad stream: {problem.request}: {problem.kind}: {problem.detail}"
            for scenario in report.scenarios
            for problem in scenario.problems[:_MAX_PROBLEMS]
        ),
    ]
    return text_page(parts)


def _failures(report: Report) -> list[str]:
    own = [f"{scenario.name}: {failure}" for scenario in report.scenarios for failure in scenario.failures]
    return [*report.failures, *own]


def _repair(repair: Repair) -> tuple[str, ...]:
    probe = repair.newcomer
    return (
        str(repair.number),
        f"{repair.at_s:.1f}",
        repair.kind,
        repair.host,
        number(repair.hold_s),
        " to ".join(number(each) for each in repair.pauses_s[:1] + repair.pauses_s[-1:]),
        number(repair.repair_s),
        number(repair.whole_s) or f"never: {repair.problem}",
        "" if probe is None else f"{probe.took_s:.2f} {probe.outcome}",
        repair.reason[:_MAX_WORDS_CHARS],
    )


def _problems(scenario: Scenario) -> str:
    shown = [
        f"- {problem.request}: {problem.kind}: {problem.detail}"
        for problem in scenario.problems[:_MAX_PROBLEMS]
    ]
    more = len(scenario.problems) - _MAX_PROBLEMS
    return "\n".join([*shown, *([f"- and {more} more"] if more > 0 else [])])


def as_dict(report: Report) -> dict[str, Any]:
    """For JSON."""
    return {
        "circumstances": report.conditions,
        "good": report.is_good,
        "lines": [line.as_dict() for line in report.lines],
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
    return json_text(as_dict(report))


def write_report(report: Report, folder: Path) -> None:
    """Write `report.md` and `report.json`.

    Args:
        report: Content of the report.
        folder: Made if it is not there.
    """
    write_files(folder, as_markdown(report), as_json(report))
