"""Report of `mesh bench chaos`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.bench.report_tools import markdown_table
from mesh.qualification.chaos.faults import MEANING
from mesh.qualification.chaos.results import by_kind

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.bench.stress.checks import Check, Line
    from mesh.qualification.chaos.results import Repair, Scenario


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


def as_markdown(report: Report) -> str:
    """The whole page."""
    sections = [
        ("# Faults in a mesh while clients read", _conditions(report)),
        ("## Acceptance", markdown_table(("measure", "wanted", "measured", "", "note"), _lines(report))),
        ("## Further checks", markdown_table(("check", "holds", "figures"), _checks(report))),
        ("## Not done", "\n".join(f"- {failure}" for failure in _failures(report))),
    ]
    for scenario in report.scenarios:
        kinds = [
            (
                MEANING[each.kind],
                str(each.count),
                str(each.num_warm),
                _number(each.median_pause_s),
                _number(each.worst_pause_s),
                _number(each.worst_silence_s),
                _number(each.median_repair_s),
                _number(each.median_whole_s),
                _number(each.worst_newcomer_s),
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
    return "\n\n".join(f"{title}\n\n{body}".strip() for title, body in sections if body) + "\n"


def as_text(report: Report) -> str:
    """For a terminal."""
    parts = [
        "\n".join(
            f"{line.verdict:>12}  {_number(line.measured):>6} {line.bound:>6}  {line.title}"
            + (f"  ({line.note})" if line.note else "")
            for line in report.lines
        ),
        "\n".join(f"{_holds(check):>14}  {check.name}: {check.detail}" for check in report.checks),
        "\n".join(f"not done: {failure}" for failure in _failures(report)),
        "\n".join(
            f"bad stream: {problem.request}: {problem.kind}: {problem.detail}"
            for scenario in report.scenarios
            for problem in scenario.problems[:_MAX_PROBLEMS]
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def _conditions(report: Report) -> str:
    found = report.conditions
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items()) + "."


def _lines(report: Report) -> list[tuple[str, ...]]:
    return [
        (line.title, line.bound, _number(line.measured), line.verdict, line.note) for line in report.lines
    ]


def _checks(report: Report) -> list[tuple[str, str, str]]:
    return [(check.name, _holds(check), check.detail) for check in report.checks]


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
        _number(repair.hold_s),
        " to ".join(_number(each) for each in repair.pauses_s[:1] + repair.pauses_s[-1:]),
        _number(repair.repair_s),
        _number(repair.whole_s) or f"never: {repair.problem}",
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


def _holds(check: Check) -> str:
    return {True: "holds", False: "FAILS", None: "unknown"}[check.holds]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


@dataclass(frozen=True)
class Report:
    """A run, worked out.

    Attributes:
        conditions: How it was made, by name.
        scenarios: Scenarios of the run.
        checks: Further checks.
        failures: What could not be done, and why.
    """

    conditions: dict[str, Any]
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

        A bound of zero is a promise; a long pause is a figure only.
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
        "circumstances": report.conditions,
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
        report: Content of the report.
        folder: Made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(as_markdown(report), encoding="utf-8")
    (folder / "report.json").write_text(as_json(report) + "\n", encoding="utf-8")
