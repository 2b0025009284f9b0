"""The report's pictures, if matplotlib is there: the extra `bench`."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from mesh.bench.pictures import can_draw, new_figure
from mesh.bench.spec.sample import MESH

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.bench.spec.rows import Row


def draw_plots(rows: Sequence[Row], folder: Path) -> tuple[str, ...]:
    """Draw what the rows have to show.

    Returns:
        Names of the files written; none, and a line in the log, without matplotlib.
    """
    if not can_draw():
        return ()
    chat = [
        row
        for row in rows
        if row.place.system == MESH
        and row.place.temperature == 0
        and not (row.place.is_raw or row.place.is_warm)
    ]
    paired = [row for row in chat if row.speed_up is not None]
    names = []
    if paired:
        _by_delay(paired, folder / "speed-up-by-delay.png")
        _by_workload(paired, folder / "speed-up-by-workload.png")
        names += ["speed-up-by-delay.png", "speed-up-by-workload.png"]
    if any(row.acceptance_per_position for row in paired):
        _by_position(paired, folder / "acceptance-by-position.png")
        names.append("acceptance-by-position.png")
    return tuple(names)


def _label(row: Row) -> str:
    return f"{row.place.setting} ({row.place.server})"


def _by_delay(rows: Sequence[Row], path: Path) -> None:
    """Mean over workloads."""
    figure, axes = new_figure("one-way delay, ms", "times faster than off, mean over workloads")
    for label in dict.fromkeys(map(_label, rows)):
        mine = [row for row in rows if _label(row) == label]
        delays = sorted({row.place.delay_ms for row in mine})
        means = [
            fmean(row.speed_up for row in mine if row.place.delay_ms == delay and row.speed_up is not None)
            for delay in delays
        ]
        axes.plot(delays, means, marker="o", label=label)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _by_workload(rows: Sequence[Row], path: Path) -> None:
    """Bars, at the longest delay."""
    delay_ms = max(row.place.delay_ms for row in rows)
    here = [row for row in rows if row.place.delay_ms == delay_ms]
    workloads = list(dict.fromkeys(row.place.workload for row in here))
    labels = list(dict.fromkeys(map(_label, here)))
    figure, axes = new_figure("", f"times faster than off at {delay_ms:g} ms")
    width = 0.8 / len(labels)
    for index, label in enumerate(labels):
        heights = {row.place.workload: row.speed_up for row in here if _label(row) == label}
        places = [number + (index - (len(labels) - 1) / 2) * width for number in range(len(workloads))]
        axes.bar(places, [heights.get(name) or 0.0 for name in workloads], width, label=label)
    axes.set_xticks(range(len(workloads)), workloads, rotation=45, ha="right")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _by_position(rows: Sequence[Row], path: Path) -> None:
    """Mean over workloads and delays."""
    figure, axes = new_figure("position in the window", "accepted up to here, share of windows")
    for label in dict.fromkeys(map(_label, rows)):
        curves = [row.acceptance_per_position for row in rows if _label(row) == label]
        longest = max(map(len, curves))
        means = [
            fmean(curve[position] for curve in curves if len(curve) > position) for position in range(longest)
        ]
        axes.plot(range(1, longest + 1), means, marker="o", label=label)
    axes.set_ylim(0, 1)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
