"""The report in words, for a page and for a terminal. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.bench.markdown_table import markdown_table
from mesh.bench.stress.step import LEAST_GAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.bench.serve.spread import Spread
    from mesh.bench.stress.check import Check
    from mesh.bench.stress.report import Report

_MIB: Final = 2**20
_STEP_HEADS: Final = (
    "at once",
    "answers",
    "tokens/s",
    "RPC tokens/s",
    "ratio",
    "TTFT p50",
    "p99",
    "ITL p50",
    "p99",
    "E2EL p50",
    "p99",
    "forks",
    "problems",
)


def as_markdown(report: Report, plots: Sequence[str]) -> str:
    """The whole page.

    Args:
        report: What to say.
        plots: Names of the picture files beside the page.
    """
    sections = [
        ("# A mesh under load, every answer checked", _circumstances(report)),
        ("## What must hold", markdown_table(("check", "holds", "figures"), _checks(report))),
        ("## Not measured", "\n".join(f"- {failure}" for failure in report.failures)),
        ("## Acceptance", markdown_table(("measure", "wanted", "measured", "", "runs"), _lines(report))),
        ("## Steps; times in ms", markdown_table(_STEP_HEADS, _steps(report))),
        ("", _saturation(report)),
        ("## Clients", markdown_table(("", "count"), _clients(report))),
        ("## Stages, over the whole run; times in ms", markdown_table(*_stages(report))),
        ("## Memory, MiB", markdown_table(*_memory(report))),
        ("", _memory_words(report)),
        ("## Pictures", "\n\n".join(f"![{name}]({name})" for name in plots)),
    ]
    return "\n\n".join(f"{title}\n\n{body}".strip() for title, body in sections if body) + "\n"


def as_text(report: Report) -> str:
    """For a terminal."""
    parts = [
        "\n".join(
            f"{line.verdict:>12}  {_number(line.measured):>6} {line.bound:>6}  {line.title}  ({line.note})"
            for line in report.lines
        ),
        "\n".join("  ".join(cell.rjust(12) for cell in row) for row in _table(_STEP_HEADS, _steps(report))),
        _saturation(report),
        "\n".join(f"{name:>40}: {count}" for name, count in _clients(report)),
        "\n".join(f"{_holds(check):>14}  {check.name}: {check.detail}" for check in report.checks),
        "\n".join(f"not measured: {failure}" for failure in report.failures),
    ]
    return "\n\n".join(part for part in parts if part)


def _circumstances(report: Report) -> str:
    found = report.circumstances
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items()) + "."


def _lines(report: Report) -> list[tuple[str, ...]]:
    return [
        (line.title, line.bound, _number(line.measured), line.verdict, line.note) for line in report.lines
    ]


def _checks(report: Report) -> list[tuple[str, str, str]]:
    return [(check.name, _holds(check), check.detail) for check in report.checks]


def _holds(check: Check) -> str:
    return {True: "holds", False: "FAILS", None: "cannot be said"}[check.holds]


def _steps(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            str(step.concurrency),
            f"{step.figures.completed} of {step.figures.num_requests}",
            f"{step.tokens_per_s:.1f}",
            "" if step.peer_tokens_per_s is None else f"{step.peer_tokens_per_s:.1f}",
            "" if step.ratio is None else f"{step.ratio:.2f}",
            *_percentiles(step.figures.ttft_ms),
            *_percentiles(step.figures.itl_ms),
            *_percentiles(step.figures.e2el_ms),
            f"{step.judgement.fork_rate:.1%}",
            str(len(step.judgement.problems)),
        )
        for step in report.steps
    ]


def _percentiles(found: Spread | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    return f"{found.percentiles[50.0]:.1f}", f"{found.percentiles[99.0]:.1f}"


def _saturation(report: Report) -> str:
    if not report.has_ramp:
        return ""
    if report.saturation is None:
        return f"Not saturated: the most requests at once still brought over {LEAST_GAIN:.0%} more tokens/s."
    return f"Saturated at {report.saturation} at once: no more of them bring {LEAST_GAIN:.0%} more tokens/s."


def _clients(report: Report) -> list[tuple[str, str]]:
    return [] if report.clients is None else report.clients.rows()


def _stages(report: Report) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = ("stage", "host", "layers", "windows", "rows in a batch", "mean compute", "mean queue")
    return heads, [
        (
            str(stage["index"]),
            stage["host"],
            "[{}, {})".format(*stage["layers"]),
            str(stage["windows"]),
            f"{stage['rows'] / stage['decodes']:.1f}" if stage.get("decodes") else "",
            f"{stage['mean_compute_ms']:.2f}",
            f"{stage['mean_queue_ms']:.2f}",
        )
        for stage in report.stages
    ]


def _memory(report: Report) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads: tuple[str, ...] = ("host", "role", "processes", "most", "growth under steady load")
    rows: list[tuple[str, ...]] = [
        (
            f"host{each.host}",
            each.role,
            str(each.num_processes),
            f"{each.max_bytes / _MIB:.0f}",
            "; ".join(
                f"{growth.growth_bytes / _MIB:+.1f} ({growth.slope_bytes_per_hour / _MIB:+.1f} per hour)"
                for growth in each.growth
            ),
        )
        for each in report.memory
    ]
    return heads, rows


def _memory_words(report: Report) -> str:
    if not report.memory:
        return ""
    return (
        "Proportional set sizes: pages that processes share are divided among them. Growth is from the "
        "median of the first half after the warm-up, a quarter of the time, to that of the second; it counts "
        "as none up to 8 MiB, or 2 % where that is more."
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    return [heads, *rows] if rows else []


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
