"""The report's pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from mesh.bench.pictures import can_draw, new_figure
from mesh.bench.serve.figures import running_over_time

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.bench.serve.record import Record

_NUM_BINS: Final = 60


def draw_plots(records: Sequence[Record], folder: Path) -> tuple[str, ...]:
    """Draw what the requests have to show.

    Returns:
        Names of the files written; none, and a line in the log, without matplotlib.
    """
    answered = [record for record in records if record.failure is None]
    if not answered or not can_draw():
        return ()
    _latencies(answered, folder / "latencies.png")
    _waits(records, folder / "latency-over-time.png")
    _load(records, folder / "load-over-time.png")
    return ("latencies.png", "latency-over-time.png", "load-over-time.png")


def _latencies(answered: Sequence[Record], path: Path) -> None:
    """Cumulative shares."""
    figure, axes = new_figure("ms", "share that is no longer than this")
    curves = {
        "TTFT": [record.ttft_ms for record in answered],
        "TPOT": [record.tpot_ms for record in answered if record.tpot_ms is not None],
        "ITL": [gap for record in answered for gap in record.itls_ms],
        "E2EL": [record.e2el_ms for record in answered],
    }
    for label, values in curves.items():
        if values:
            axes.ecdf(values, label=label)
    axes.set_xscale("log")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _waits(records: Sequence[Record], path: Path) -> None:
    """Each request where it was to be sent."""
    figure, axes = new_figure("scheduled at, s", "ms from the schedule")
    answered = [record for record in records if record.failure is None]
    scheduled_s = [record.scheduled_s for record in answered]
    first_ms = [record.ttft_ms + record.delay_ms for record in answered]
    last_ms = [record.e2el_ms + record.delay_ms for record in answered]
    axes.plot(scheduled_s, last_ms, ".", label="E2EL")
    axes.plot(scheduled_s, first_ms, ".", label="TTFT")
    for record in records:
        if record.failure is not None:
            axes.axvline(record.scheduled_s, color="red", alpha=0.3, linewidth=0.8)
    axes.set_title("red: not answered, or not in full", fontsize="small")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _load(records: Sequence[Record], path: Path) -> None:
    """Requests under way, and tokens a second; an answer's tokens are spread evenly over its parts."""
    figure, axes = new_figure("s", "requests under way")
    course = running_over_time(records)
    axes.step([at_s for at_s, _ in course], [running for _, running in course], where="post")
    times = [part_s for record in records for part_s in record.parts_s]
    weights = [record.num_output_tokens / len(record.parts_s) for record in records for _ in record.parts_s]
    if times:
        counts, edges = np.histogram(times, bins=_NUM_BINS, range=(0.0, course[-1][0]), weights=weights)
        rates = axes.twinx()
        rates.set_ylabel("output tokens/s")
        rates.stairs(counts / np.diff(edges), edges, color="tab:orange")
    figure.savefig(path, dpi=120)
