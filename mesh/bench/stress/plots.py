"""The report's pictures."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from mesh.bench.pictures import can_draw, new_figure

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.bench.stress.report import Report

_MIB: Final = 2**20


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
        _memory(report, folder / "memory.png")
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
    axes.legend(fontsize="small", loc="lower right")
    figure.savefig(path, dpi=120)


def _memory(report: Report, path: Path) -> None:
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
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
