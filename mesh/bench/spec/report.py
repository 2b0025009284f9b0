"""What the samples amount to, and the folder that says it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mesh.bench.spec.acceptance import Closeness, Line, acceptance_lines, closeness
from mesh.bench.spec.markdown import as_markdown
from mesh.bench.spec.plots import draw_plots
from mesh.bench.spec.recommendation import Recommendation, recommend
from mesh.bench.spec.rows import Row, rows_of

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from mesh.bench.spec.results import Results


@dataclass(frozen=True)
class Report:
    """A run, worked out.

    Attributes:
        results: What was measured.
        rows: Means for each workload, setting and delay.
        lines: The acceptance table; empty if the run was not to show it.
        closeness: How much of `replay`'s rate `auto` reached.
        recommendation: What to serve with.
    """

    results: Results
    rows: tuple[Row, ...]
    lines: tuple[Line, ...]
    closeness: tuple[Closeness, ...]
    recommendation: Recommendation


def work_out(results: Results, *, categories: Collection[str], with_acceptance: bool) -> Report:
    """Everything that follows from what was measured.

    Args:
        results: What was measured.
        categories: Names of Spec-Bench's workloads.
        with_acceptance: Whether the run was to show the acceptance table.
    """
    rows = rows_of(results.samples)
    lines = acceptance_lines(results.samples, rows, results.crowds, categories) if with_acceptance else ()
    return Report(results, rows, lines, closeness(rows), recommend(rows))


def write_report(report: Report, folder: Path) -> None:
    """Write `report.md`, `report.json` and the pictures.

    Args:
        report: What to say.
        folder: Made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots = draw_plots(report.rows, folder)
    (folder / "report.md").write_text(as_markdown(report, plots), encoding="utf-8")
    text = json.dumps(_as_dict(report), indent=1, ensure_ascii=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")


def _as_dict(report: Report) -> dict[str, Any]:
    results = report.results
    return {
        "circumstances": asdict(results.circumstances),
        "took_s": results.took_s,
        "hops_ms": results.hops_ms,
        "servers": results.servers,
        "acceptance": [{**asdict(line), "verdict": line.verdict} for line in report.lines],
        "auto_of_replay": [asdict(found) for found in report.closeness],
        "recommendation": asdict(report.recommendation),
        "rows": [asdict(row) for row in report.rows],
        "crowds": [{**asdict(crowd), "ratio": crowd.ratio} for crowd in results.crowds],
        "llama_cpp_rpc": {"delay_ms": results.peer_delay_ms, "tokens_per_s": results.peer_rates},
        "failures": results.failures,
        "samples": [
            {**asdict(sample), "tokens_per_s": sample.tokens_per_s, "ttft_ms": sample.ttft_ms}
            for sample in results.samples
        ],
    }
