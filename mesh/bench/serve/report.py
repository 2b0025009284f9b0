"""A run and the folder that says it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mesh.bench.serve.lines import as_markdown
from mesh.bench.serve.plots import draw_plots

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.bench.serve.circumstances import Circumstances
    from mesh.bench.serve.figures import Figures
    from mesh.bench.serve.record import Record
    from mesh.bench.serve.spread import Spread


@dataclass(frozen=True)
class Report:
    """A run, worked out.

    Attributes:
        circumstances: How it was made.
        figures: What was found.
        records: One for each request that was sent, in the order of the schedule.
        client_cpu_share: Of a core that this client used, mean over the run.
    """

    circumstances: Circumstances
    figures: Figures
    records: tuple[Record, ...]
    client_cpu_share: float


def as_dict(report: Report) -> dict[str, Any]:
    """For JSON, without the single requests. What vLLM's `bench serve` measures too has its names there."""
    figures = report.figures
    return {
        "circumstances": asdict(report.circumstances),
        "duration": figures.duration_s,
        "completed": figures.completed,
        "failed": figures.failed,
        "rejected": figures.rejected,
        "unfinished": figures.unfinished,
        "failures": [asdict(failure) for failure in figures.failures],
        "retry_after": figures.retry_after,
        "total_input_tokens": figures.total_input_tokens,
        "total_cached_tokens": figures.total_cached_tokens,
        "total_output_tokens": figures.total_output_tokens,
        "num_without_usage": figures.num_without_usage,
        "num_stopped_early": figures.num_stopped_early,
        "request_throughput": figures.request_throughput,
        "output_throughput": figures.output_throughput,
        "total_token_throughput": figures.total_token_throughput,
        "request_goodput": figures.request_goodput,
        "good_share": figures.good_share,
        "scheduled_good_share": figures.scheduled_good_share,
        "mean_concurrency": figures.mean_concurrency,
        "max_concurrent_requests": figures.max_concurrency,
        **_spread("ttft", figures.ttft_ms),
        **_spread("tpot", figures.tpot_ms),
        **_spread("itl", figures.itl_ms),
        **_spread("e2el", figures.e2el_ms),
        **_spread("scheduled_ttft", figures.scheduled_ttft_ms),
        **_spread("scheduled_e2el", figures.scheduled_e2el_ms),
        **_spread("client_queue", figures.queue_ms),
        **_spread("client_lag", figures.lag_ms),
        "client_cpu_share": report.client_cpu_share,
    }


def as_json(report: Report, *, with_requests: bool = False) -> str:
    """The report for programs; infinite numbers, which JSON has not, as text.

    Args:
        report: What to say.
        with_requests: Whether each request is told of too.
    """
    fields = as_dict(report)
    if with_requests:
        fields["requests"] = [_request(record) for record in report.records]
    return json.dumps(_finite(fields), indent=1, ensure_ascii=False, allow_nan=False)


def write_report(report: Report, folder: Path) -> None:
    """Write `report.md`, `report.json` and the pictures.

    Args:
        report: What to say.
        folder: Made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots = draw_plots(report.records, folder)
    (folder / "report.md").write_text(as_markdown(report, plots), encoding="utf-8")
    (folder / "report.json").write_text(as_json(report, with_requests=True) + "\n", encoding="utf-8")


def _spread(name: str, found: Spread | None) -> dict[str, float]:
    if found is None:
        return {}
    return {
        f"mean_{name}_ms": found.mean,
        f"median_{name}_ms": found.median,
        f"std_{name}_ms": found.std,
        f"max_{name}_ms": found.highest,
        **{f"p{wanted:g}_{name}_ms": value for wanted, value in found.percentiles.items()},
    }


def _request(record: Record) -> dict[str, Any]:
    answered = record.failure is None
    return {
        **asdict(record),
        "ttft_ms": record.ttft_ms if answered else None,
        "tpot_ms": record.tpot_ms if answered else None,
        "e2el_ms": record.e2el_ms if answered else None,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
