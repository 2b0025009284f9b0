"""Report of `mesh bench stress`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mesh.status import as_json
from meshbench.report_tools import (
    PICTURES,
    Report,
    Section,
    all_hold,
    checks_section,
    lines_section,
    list_section,
    markdown_table,
    new_figure,
    save_figure,
    table_section,
)
from meshbench.stress.checks import LEAST_GAIN
from meshbench.under_test.links import links_section

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from mesh.status import StageStatus
    from meshbench.lab.memory_watch import MemorySample
    from meshbench.report_tools import Check, Line
    from meshbench.serving_metrics import Spread
    from meshbench.stress.checks import ClientCounts, Step
    from meshbench.stress.memory import Footprint, Growth
    from meshbench.under_test.links import KnownLinks
    from meshbench.under_test.status_figures import RingLink

_MIB: Final = 2**20
_MEMORY_WORDS: Final = (
    "Proportional set sizes: pages that processes share are divided among them. Growth is from the "
    "median of the first half after the warm-up, a quarter of the time, to that of the second; it counts "
    "as none up to 8 MiB, or 2 % where that is more."
)
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
    """Memory of all processes of one role on one host, over the run."""

    host: int
    """Its number."""
    role: str
    """See `memory_watch.Role`."""
    num_processes: int
    """Most at once."""
    max_bytes: int
    """Most that they took together."""
    growth: tuple[Growth, ...]
    """Of each steady load's processes of this role, one after the other; none if it was too short."""


@dataclass(frozen=True)
class Findings:
    """A run, worked out."""

    conditions: dict[str, Any]
    """How it was made, by name."""
    steps: tuple[Step, ...]
    """Of the ramp, the soak last."""
    has_ramp: bool
    """Whether there were several steps of a ramp."""
    saturation: int | None
    """Concurrency after which more brings nothing; None if there is none."""
    lines: tuple[Line, ...]
    """Of the acceptance table."""
    checks: tuple[Check, ...]
    """Checks of the run."""
    footprints: tuple[Footprint, ...]
    """Of every stage."""
    stages: tuple[StageStatus, ...]
    """Stages at the end, with times and counts of this run."""
    memory: tuple[RoleMemory, ...]
    """By host and role."""
    samples: tuple[MemorySample, ...]
    """What the memory figures are made of."""
    failures: tuple[str, ...]
    """What could not be measured, and why."""
    clients: ClientCounts | None = None
    """What became of them, if some were to hang up."""
    links: KnownLinks | None = None
    """Links between the hosts as the head measured them; None if it was not asked."""
    ring_links: tuple[RingLink, ...] = ()
    """Links of the ring as decoding windows met them."""
    groups_found: Mapping[int, int] = field(default_factory=dict)
    """Best number of groups that the mesh has found, by the number of sessions."""
    omitted: tuple[str, ...] = ()
    """What cannot be measured of such a mesh, which is no failure."""


def stress_report(found: Findings) -> Report:
    """Report of a run; good if no check and no measurement failed: a line that was missed is a figure."""
    is_good = not found.failures and all_hold(found.checks)
    pictures: dict[str, Callable[[Path], None]] = {}
    if len(found.steps) > 1:
        pictures["ramp.png"] = partial(_ramp, found.steps)
    if found.samples:
        pictures["memory.png"] = partial(_plot_memory, found.samples)
    return Report(
        title="A mesh under load, every answer checked",
        conditions=found.conditions,
        sections=_sections(found),
        fields={"good": is_good, **_fields(found)},
        is_good=is_good,
        samples={"samples": found.samples},
        pictures=pictures,
    )


def _sections(found: Findings) -> list[Section]:
    saturation = _saturation(found)
    clients = [] if found.clients is None else found.clients.rows()
    clients_text = "\n".join(f"{name:>40}: {count}" for name, count in clients)
    return [
        checks_section("## Checks", found.checks),
        list_section("## Not measured", "not measured", found.failures),
        list_section("## Not measured from outside", "not measured from outside", found.omitted),
        lines_section("## Acceptance", found.lines),
        table_section("## Steps; times in ms", *_steps(found.steps)),
        Section("", saturation, saturation),
        Section("## Clients", markdown_table(("", "count"), clients), clients_text),
        Section("## Stages, over the whole run; times in ms", _stages(found.stages)),
        Section("", _groups(found.groups_found)),
        Section("## Links of the ring, over the whole run", _ring_links(found.ring_links)),
        links_section(found.links),
        Section("## Memory, MiB", _memory(found.memory)),
        Section("", _MEMORY_WORDS if found.memory else ""),
        PICTURES,
    ]


def _steps(steps: Sequence[Step]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows, with a further column where limits were given."""
    has_goodput = any(step.figures.request_goodput is not None for step in steps)
    heads = (*_STEP_HEADS, *("good requests/s",) * has_goodput)
    return heads, [(*_step(step), *(_goodput(step),) * has_goodput) for step in steps]


def _step(step: Step) -> tuple[str, ...]:
    return (
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
    )


def _goodput(step: Step) -> str:
    per_s, share = step.figures.request_goodput, step.figures.good_share
    return "" if per_s is None or share is None else f"{per_s:.2f} ({share:.0%})"


def _percentiles(found: Spread | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    return f"{found.percentiles[50.0]:.1f}", f"{found.percentiles[99.0]:.1f}"


def _saturation(found: Findings) -> str:
    if not found.has_ramp:
        return ""
    if found.saturation is None:
        return f"Not saturated: the most requests at once still brought over {LEAST_GAIN:.0%} more tokens/s."
    return f"Saturated at {found.saturation} at once: no more of them bring {LEAST_GAIN:.0%} more tokens/s."


def _stages(stages: Sequence[StageStatus]) -> str:
    heads = ("stage", "host", "layers", "windows", "rows in a batch", "mean compute", "mean queue")
    return markdown_table(
        heads,
        (
            (
                str(stage.index),
                stage.host,
                "[{}, {})".format(*stage.layers),
                str(stage.windows),
                f"{(stage.rows or 0) / stage.decodes:.1f}" if stage.decodes else "",
                f"{stage.mean_compute_ms:.2f}",
                f"{stage.mean_queue_ms:.2f}",
            )
            for stage in stages
        ),
    )


def _groups(groups_found: Mapping[int, int]) -> str:
    if not groups_found:
        return ""
    found = ", ".join(f"{groups} for {sessions}" for sessions, groups in groups_found.items())
    return f"Groups of sessions found best, by the number of sessions: {found}."


def _ring_links(links: Sequence[RingLink]) -> str:
    heads = ("from", "to", "decoding windows", "mean ms on the wire, message handling included")
    return markdown_table(
        heads, ((link.source, link.target, str(link.num_windows), f"{link.wire_ms:.2f}") for link in links)
    )


def _memory(memory: Sequence[RoleMemory]) -> str:
    return markdown_table(
        ("host", "role", "processes", "most", "growth under steady load"),
        (
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
            for each in memory
        ),
    )


def _ramp(all_steps: Sequence[Step], path: Path) -> None:
    """Throughput, and what a user waits for a token."""
    steps = sorted(all_steps, key=lambda step: step.concurrency)
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


def _plot_memory(samples: Sequence[MemorySample], path: Path) -> None:
    """Every process of the mesh that is not Ray's."""
    figure, axes = new_figure("s", "MiB")
    start_s = samples[0].at_s
    curves: dict[tuple[int, str, int], list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        if sample.role in {"stage", "coordinator", "join"}:
            key = (sample.host, sample.role, sample.pid)
            curves[key].append((sample.at_s - start_s, sample.own_bytes / _MIB))
    for (host, role, _pid), points in sorted(curves.items()):
        axes.plot(*zip(*points, strict=True), label=f"host{host} {role}")
    axes.set_ylim(bottom=0)
    save_figure(figure, axes, path)


def _fields(found: Findings) -> dict[str, Any]:
    return {
        "circumstances": found.conditions,
        "steps": [
            {
                "concurrency": step.concurrency,
                "tokens_per_s": step.tokens_per_s,
                "peer_tokens_per_s": step.peer_tokens_per_s,
                "ratio": step.ratio,
                "fork_rate": step.answer_check.fork_rate,
                "problems_by_kind": step.answer_check.by_kind,
                "figures": step.figures,
                "judgement": step.answer_check,
            }
            for step in found.steps
        ],
        "saturation": found.saturation,
        "lines": found.lines,
        "checks": found.checks,
        "footprints": [
            {**asdict(each), "overhead_bytes": each.overhead_bytes, "is_within": each.is_within}
            for each in found.footprints
        ],
        "stages": as_json(found.stages),
        "memory": found.memory,
        "failures": found.failures,
        "clients": found.clients,
        "links": None if found.links is None else found.links.found,
        "ring_links": found.ring_links,
        "groups_found": as_json(found.groups_found),
        "not_measured_from_outside": found.omitted,
    }
