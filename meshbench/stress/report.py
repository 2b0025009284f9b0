"""Report of `mesh bench stress`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from meshbench.report_tools import (
    Check,
    Line,
    can_draw,
    checks_table,
    checks_text,
    conditions_text,
    json_text,
    lines_table,
    lines_text,
    markdown_page,
    markdown_table,
    new_figure,
    pictures_section,
    save_figure,
    text_page,
    write_files,
)
from meshbench.stress.checks import LEAST_GAIN
from meshbench.under_test.links import links_section

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from meshbench.lab.memory_watch import MemorySample
    from meshbench.serving_metrics import Spread
    from meshbench.stress.checks import ClientCounts, Step
    from meshbench.stress.memory import Footprint, Growth
    from meshbench.under_test.links import KnownLinks
    from meshbench.under_test.status_figures import RingLink

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


@dataclass(frozen=True)
class RoleMemory:
    """Memory of all processes of one role on one host, over the run.

    Attributes:
        host: Its number.
        role: See `memory_watch.Role`.
        num_processes: Most at once.
        max_bytes: Most that they took together.
        growth: Of each steady load's processes of this role, one after the other; none if it was too short.
    """

    host: int
    role: str
    num_processes: int
    max_bytes: int
    growth: tuple[Growth, ...]


@dataclass(frozen=True)
class Report:
    """A run, worked out.

    Attributes:
        conditions: How it was made, by name.
        steps: Of the ramp, the soak last.
        has_ramp: Whether there were several steps of a ramp.
        saturation: Concurrency after which more brings nothing; None if there is none.
        lines: Of the acceptance table.
        checks: Checks of the run.
        footprints: Of every stage.
        stages: Stages of `/mesh/status` at the end, with times and counts of this run.
        memory: By host and role.
        samples: What the memory figures are made of.
        failures: What could not be measured, and why.
        clients: What became of them, if some were to hang up.
        links: Links between the hosts as the head measured them; None if it was not asked.
        ring_links: Links of the ring as decoding windows met them.
        groups_found: Best number of groups that the mesh has found, by the number of sessions.
        omitted: What cannot be measured of such a mesh, which is no failure.
    """

    conditions: dict[str, Any]
    steps: tuple[Step, ...]
    has_ramp: bool
    saturation: int | None
    lines: tuple[Line, ...]
    checks: tuple[Check, ...]
    footprints: tuple[Footprint, ...]
    stages: tuple[dict[str, Any], ...]
    memory: tuple[RoleMemory, ...]
    samples: tuple[MemorySample, ...]
    failures: tuple[str, ...]
    clients: ClientCounts | None = None
    links: KnownLinks | None = None
    ring_links: tuple[RingLink, ...] = ()
    groups_found: Mapping[str, int] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether nothing failed: neither a check, nor a measurement. A line that was missed is a figure."""
        return not self.failures and all(check.holds is not False for check in self.checks)


def as_markdown(report: Report, plots: Sequence[str]) -> str:
    """The whole page.

    Args:
        report: Content of the report.
        plots: Names of the picture files beside the page.
    """
    sections = [
        ("# A mesh under load, every answer checked", conditions_text(report.conditions)),
        ("## Checks", checks_table(report.checks)),
        ("## Not measured", "\n".join(f"- {failure}" for failure in report.failures)),
        ("## Not measured from outside", "\n".join(f"- {what}" for what in report.omitted)),
        ("## Acceptance", lines_table(report.lines)),
        ("## Steps; times in ms", markdown_table(_heads(report), _steps(report))),
        ("", _saturation(report)),
        ("## Clients", markdown_table(("", "count"), _clients(report))),
        ("## Stages, over the whole run; times in ms", markdown_table(*_stages(report))),
        ("", _groups(report)),
        ("## Links of the ring, over the whole run", markdown_table(*_ring_links(report))),
        *(() if report.links is None else (links_section(report.links),)),
        ("## Memory, MiB", markdown_table(*_memory(report))),
        ("", _memory_words(report)),
        pictures_section(plots),
    ]
    return markdown_page(sections)


def as_text(report: Report) -> str:
    """For a terminal."""
    parts = [
        lines_text(report.lines),
        "\n".join(
            "  ".join(cell.rjust(12) for cell in row) for row in _table(_heads(report), _steps(report))
        ),
        _saturation(report),
        "\n".join(f"{name:>40}: {count}" for name, count in _clients(report)),
        checks_text(report.checks),
        "\n".join(f"not measured: {failure}" for failure in report.failures),
        "\n".join(f"not measured from outside: {what}" for what in report.omitted),
    ]
    return text_page(parts)


def _heads(report: Report) -> tuple[str, ...]:
    return (*_STEP_HEADS, *("good requests/s",) * _has_goodput(report))


def _has_goodput(report: Report) -> bool:
    return any(step.figures.request_goodput is not None for step in report.steps)


def _goodput(step: Step) -> str:
    per_s, share = step.figures.request_goodput, step.figures.good_share
    return "" if per_s is None or share is None else f"{per_s:.2f} ({share:.0%})"


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
            f"{step.answer_check.fork_rate:.1%}",
            str(len(step.answer_check.problems)),
            *(_goodput(step),) * _has_goodput(report),
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


def _groups(report: Report) -> str:
    if not report.groups_found:
        return ""
    found = ", ".join(f"{groups} for {sessions}" for sessions, groups in report.groups_found.items())
    return f"Groups of sessions found best, by the number of sessions: {found}."


def _ring_links(report: Report) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = ("from", "to", "decoding windows", "mean ms on the wire, message handling included")
    return heads, [
        (link.source, link.target, str(link.num_windows), f"{link.wire_ms:.2f}") for link in report.ring_links
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


def draw_plots(report: Report, folder: Path) -> tuple[str, ...]:
    """Draw the ramp and the memory.

    Returns:
        Names of the files written; none, and a line in the log, without matplotlib.
    """
    if not can_draw():
        return ()
    names = []
    if len(report.steps) > 1:
        _ramp(report, folder / "ramp.png")
        names.append("ramp.png")
    if report.samples:
        _plot_memory(report, folder / "memory.png")
        names.append("memory.png")
    return tuple(names)


def _ramp(report: Report, path: Path) -> None:
    """Throughput, and what a user waits for a token."""
    steps = sorted(report.steps, key=lambda step: step.concurrency)
    figure, axes = new_figure("requests at once", "tokens/s")
    at_once = [step.concurrency for step in steps]
    axes.plot(at_once, [step.tokens_per_s for step in steps], "o-", label="mesh")
    peer = [(step.concurrency, step.peer_tokens_per_s) for step in steps if step.peer_tokens_per_s]
    if peer:
        axes.plot(*zip(*peer, strict=True), "s--", label="llama.cpp RPC")
    waits = axes.twinx()
    waits.set_ylabel("ITL p99, ms")
    known = [(step.concurrency, step.figures.itl_ms) for step in steps]
    points = [(number, itl.percentiles[99.0]) for number, itl in known if itl is not None]
    if points:
        waits.plot(*zip(*points, strict=True), "^:", color="tab:red")
    axes.set_ylim(bottom=0)
    save_figure(figure, axes, path)


def _plot_memory(report: Report, path: Path) -> None:
    """Every process of the mesh that is not Ray's."""
    figure, axes = new_figure("s", "MiB")
    start_s = report.samples[0].at_s
    curves: dict[tuple[int, str, int], list[tuple[float, float]]] = defaultdict(list)
    for sample in report.samples:
        if sample.role in {"stage", "coordinator", "join"}:
            key = (sample.host, sample.role, sample.pid)
            curves[key].append((sample.at_s - start_s, sample.own_bytes / _MIB))
    for (host, role, _pid), points in sorted(curves.items()):
        axes.plot(*zip(*points, strict=True), label=f"host{host} {role}")
    axes.set_ylim(bottom=0)
    save_figure(figure, axes, path)


def as_dict(report: Report) -> dict[str, Any]:
    """For JSON."""
    return {
        "circumstances": report.conditions,
        "good": report.is_good,
        "steps": [
            {
                "concurrency": step.concurrency,
                "tokens_per_s": step.tokens_per_s,
                "peer_tokens_per_s": step.peer_tokens_per_s,
                "ratio": step.ratio,
                "fork_rate": step.answer_check.fork_rate,
                "problems_by_kind": step.answer_check.by_kind,
                "figures": asdict(step.figures),
                "judgement": asdict(step.answer_check),
            }
            for step in report.steps
        ],
        "saturation": report.saturation,
        "lines": [line.as_dict() for line in report.lines],
        "checks": [asdict(check) for check in report.checks],
        "footprints": [
            {**asdict(each), "overhead_bytes": each.overhead_bytes, "is_within": each.is_within}
            for each in report.footprints
        ],
        "stages": list(report.stages),
        "memory": [asdict(each) for each in report.memory],
        "failures": list(report.failures),
        "clients": None if report.clients is None else asdict(report.clients),
        "links": None if report.links is None else report.links.found,
        "ring_links": [asdict(link) for link in report.ring_links],
        "groups_found": dict(report.groups_found),
        "not_measured_from_outside": list(report.omitted),
    }


def as_json(report: Report, *, with_samples: bool = False) -> str:
    """The report for programs.

    Args:
        report: Content of the report.
        with_samples: Whether every memory sample of every process is included.
    """
    fields = as_dict(report)
    if with_samples:
        fields["samples"] = [asdict(sample) for sample in report.samples]
    return json_text(fields)


def write_report(report: Report, folder: Path) -> None:
    """Write `report.md`, `report.json` and the pictures.

    Args:
        report: Content of the report.
        folder: Made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots = draw_plots(report, folder)
    write_files(folder, as_markdown(report, plots), as_json(report, with_samples=True))
