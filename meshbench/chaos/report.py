"""Report of `mesh bench chaos`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from meshbench.chaos.results import by_kind
from meshbench.report_tools import (
    Report,
    Section,
    all_hold,
    checks_section,
    lines_section,
    list_section,
    markdown_table,
    number,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshbench.chaos.results import Repair, Scenario
    from meshbench.report_tools import Check, Line

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


def chaos_report(
    conditions: Mapping[str, Any],
    scenarios: Sequence[Scenario],
    checks: Sequence[Check],
    failures: Sequence[str],
    compared: Sequence[Line] = (),
) -> Report:
    """Report of a run; good if nothing was lost and nothing failed.

    A bound of zero is a promise; a long pause is a figure only.

    Args:
        conditions: How it was made, by name.
        scenarios: Scenarios of the run.
        checks: Further checks.
        failures: What could not be done, and why.
        compared: Pauses over those of another checkout.
    """
    lines = (*(line for scenario in scenarios for line in scenario.lines), *compared)
    own = [f"{scenario.name}: {failure}" for scenario in scenarios for failure in scenario.failures]
    not_done = [*failures, *own]
    is_good = (
        not not_done
        and all_hold(checks)
        and all(line.verdict != "missed" for line in lines if line.wanted == 0)
        and all(not scenario.problems for scenario in scenarios)
    )
    return Report(
        title="Faults in a mesh while clients read",
        conditions=conditions,
        sections=[
            lines_section("## Acceptance", lines),
            checks_section("## Further checks", checks),
            list_section("## Not done", "not done", not_done),
            *(section for scenario in scenarios for section in _sections(scenario)),
        ],
        fields={
            "circumstances": conditions,
            "good": is_good,
            "lines": lines,
            "checks": checks,
            "scenarios": [_fields(scenario) for scenario in scenarios],
            "failures": failures,
        },
        is_good=is_good,
    )


def _sections(scenario: Scenario) -> list[Section]:
    kinds = [
        (
            each.kind.meaning,
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
    name, repairs = scenario.name, [_repair(repair) for repair in scenario.repairs]
    return [
        Section(f"## Scenario `{name}` by kind; times in s", markdown_table(_KIND_HEADS, kinds)),
        Section(f"## Scenario `{name}`, one by one", markdown_table(_REPAIR_HEADS, repairs)),
        list_section(f"## Scenario `{name}`: bad streams", "bad stream", _problems(scenario)),
    ]


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


def _problems(scenario: Scenario) -> list[str]:
    problems = [f"{problem.request}: {problem.kind}: {problem.detail}" for problem in scenario.problems]
    more = len(problems) - _MAX_PROBLEMS
    return problems[:_MAX_PROBLEMS] + [f"and {more} more"] * (more > 0)


def _fields(scenario: Scenario) -> dict[str, Any]:
    return {
        "name": scenario.name,
        "kinds": by_kind(scenario.repairs),
        "repairs": scenario.repairs,
        "problems": scenario.problems,
        "failures": scenario.failures,
    }
