"""Report of `mesh bench serve`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshbench.report_tools import (
    PICTURES,
    Report,
    Section,
    columns_text,
    list_section,
    markdown_table,
    new_figure,
    number,
    save_figure,
    table_section,
)
from meshbench.serving_metrics import running_over_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from meshbench.request_record import Record
    from meshbench.serving_metrics import Figures, Spread

# A client that is later than this with its requests, or busier for long, has measured itself too.
_NOTABLE_LAG_MS: Final = 20.0
_NOTABLE_CPU_SHARE: Final = 0.5
_LONG_S: Final = 1.0
_NUM_BINS: Final = 60
_DEFINITIONS: Final = (
    "TTFT, time to first token: from sending the request to the first part of its answer. TPOT, time "
    "per output token: (E2EL − TTFT) / (output tokens − 1), of each answer. ITL, inter-token latency: "
    "from each part to the next, of all answers together; a part may hold several tokens. E2EL, "
    "end-to-end latency: from sending the request to the end of its answer. What counts from the "
    "schedule begins when the request was to be sent. Latencies are those of completed requests; rates "
    "are over the whole run, and shares are of all requests, failed and rejected ones too."
)
_NAMES_OF_VLLM: Final = {"duration_s": "duration", "max_concurrency": "max_concurrent_requests"}


@dataclass(frozen=True)
class Findings:
    """A run, worked out."""

    conditions: RunConditions
    """How it was made."""
    figures: Figures
    """Figures of the measurement."""
    records: tuple[Record, ...]
    """One for each request that was sent, in the order of the schedule."""
    client_cpu_share: float
    """Of a core that this client used, mean over the run."""


@dataclass(frozen=True)
class RunConditions:
    """Description of the load."""

    url: str
    """The server's."""
    endpoint: str
    """`chat` or `completions`."""
    model: str
    """Name that requests gave."""
    loop: str
    """How the server was loaded, in words."""
    rate: float | None
    """Requests a second of an open loop; None for a closed one."""
    burstiness: float | None
    """Of an open loop's arrivals; None for a closed one."""
    concurrency: int | None
    """Limit of requests under way; None without."""
    num_planned: int
    """Requests that were to be sent."""
    prompts: str
    """Where they are from, in words."""
    num_prompts: int
    """How many there were, no two of them the same request."""
    max_tokens: int
    """Of each answer."""
    temperature: float | None
    """Of sampling; None if left to the server."""
    ignore_eos: bool
    """Whether answers continued to the last token."""
    extra_body: dict[str, Any] | None
    """Further fields of each request."""
    goodput: dict[str, float]
    """The limits, in milliseconds, by latency."""
    seed: int
    """Of prompts, their order, and arrivals."""
    num_warmup: int
    """Requests before those measured."""
    started_at: str
    """Wall clock at the start, ISO 8601 with zone."""
    software: str
    """Version of this client."""


def serving_report(findings: Findings) -> Report:
    """Report of a run; good if a request was answered."""
    rates, failures = _rates(findings), _failures(findings.figures)
    rate_heads, failure_heads = ("what", "measured"), ("kind", "requests", "the first said")
    return Report(
        title="A server under load, measured",
        sections=[
            Section("", _conditions(findings.conditions)),
            list_section("## Warnings", "warning", warnings(findings)),
            Section("## Requests and rates", markdown_table(rate_heads, rates), columns_text(rates)),
            table_section("## Latencies, ms", *_latencies(findings)),
            Section("", _DEFINITIONS),
            Section("## Failures", markdown_table(failure_heads, failures), columns_text(failures)),
            PICTURES,
        ],
        fields=_fields(findings),
        is_good=findings.figures.completed > 0,
        samples={"requests": [_request(record) for record in findings.records]},
        pictures=_pictures(findings.records),
    )


def warnings(findings: Findings) -> list[str]:
    """Notes for the reader of the figures."""
    figures, conditions = findings.figures, findings.conditions
    found = []
    if figures.num_requests < conditions.num_planned:
        found.append(f"interrupted: {figures.num_requests} of {conditions.num_planned} requests were sent")
    if figures.num_without_usage:
        found.append(
            f"{figures.num_without_usage} answers came without `usage`: their streamed parts are counted as "
            "tokens, too few where a part holds several, and their input is not counted"
        )
    if conditions.ignore_eos and figures.num_stopped_early:
        found.append(
            f"{figures.num_stopped_early} answers ended before the last token: the server does not know "
            "`ignore_eos`, so answers differ in length"
        )
    if conditions.num_prompts < figures.num_requests:
        found.append(
            f"{figures.num_requests} requests out of {conditions.num_prompts} prompts: a cache of "
            "prefixes flatters whatever is asked twice"
        )
    if figures.lag_ms is not None and figures.lag_ms.highest > _NOTABLE_LAG_MS:
        found.append(
            f"this client was up to {figures.lag_ms.highest:.0f} ms late with its requests: its machine is "
            "too busy, and the server looks slower than it is"
        )
    if findings.client_cpu_share > _NOTABLE_CPU_SHARE and figures.duration_s >= _LONG_S:
        found.append(
            f"this client used {findings.client_cpu_share:.0%} of a core: run it on another machine than the "
            "server's"
        )
    return found


def _conditions(found: RunConditions) -> str:
    temperature = "the server's own" if found.temperature is None else f"{found.temperature:g}"
    extra = f" Further fields: `{found.extra_body}`." if found.extra_body else ""
    return (
        f"{found.url}, {found.endpoint} endpoint, model {found.model}. "
        f"{found.loop[0].upper()}{found.loop[1:]}, {found.num_planned} requests after {found.num_warmup} to "
        f"warm up; {found.prompts}; at most {found.max_tokens} tokens per answer"
        f"{', end of text ignored' if found.ignore_eos else ''}; temperature {temperature}; seed "
        f"{found.seed}.{extra} {found.software}, {found.started_at}."
    )


def _rates(findings: Findings) -> list[tuple[str, str]]:
    figures = findings.figures
    return [
        ("Completed requests", f"{figures.completed} of {figures.num_requests}"),
        ("Failed", str(figures.failed)),
        ("Rejected with 429", _rejected(figures)),
        ("Unfinished", str(figures.unfinished)),
        ("Duration, s", f"{figures.duration_s:.2f}"),
        ("Input tokens", _count(figures.total_input_tokens)),
        ("  of these from a cache", _count(figures.total_cached_tokens)),
        ("Output tokens", _count(figures.total_output_tokens)),
        ("Request throughput, requests/s", f"{figures.request_throughput:.2f}"),
        ("Output token throughput, tokens/s", f"{figures.output_throughput:.2f}"),
        ("Total token throughput, tokens/s", number(figures.total_token_throughput)),
        *_goodput(findings),
        ("Concurrency, mean", f"{figures.mean_concurrency:.2f}"),
        ("Concurrency, peak", str(figures.max_concurrency)),
        ("CPU used by this client, cores", f"{findings.client_cpu_share:.2f}"),
    ]


def _rejected(figures: Figures) -> str:
    waits = ", ".join(f"{wait} ({count})" for wait, count in sorted(figures.retry_after.items()))
    return f"{figures.rejected}{f'; Retry-After, s: {waits}' if waits else ''}"


def _goodput(findings: Findings) -> list[tuple[str, str]]:
    figures = findings.figures
    if figures.request_goodput is None or figures.good_share is None:
        return []
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in findings.conditions.goodput.items())
    lines = [(f"Request goodput ({limits}), requests/s", f"{figures.request_goodput:.2f}")]
    lines.append(("  share of all requests", f"{figures.good_share:.1%}"))
    if findings.conditions.rate is not None and figures.scheduled_good_share is not None:
        lines.append(("  counted from the schedule", f"{figures.scheduled_good_share:.1%}"))
    return lines


def _latencies(findings: Findings) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows; a closed loop has no schedule to count from."""
    figures = findings.figures
    rows = [
        ("TTFT", figures.ttft_ms),
        ("TPOT", figures.tpot_ms),
        ("ITL", figures.itl_ms),
        ("E2EL", figures.e2el_ms),
    ]
    if findings.conditions.rate is not None:
        rows += [
            ("TTFT from the schedule", figures.scheduled_ttft_ms),
            ("E2EL from the schedule", figures.scheduled_e2el_ms),
            ("Wait here for a place", figures.queue_ms),
            ("Lateness of this client", figures.lag_ms),
        ]
    known = [(name, found) for name, found in rows if found is not None]
    percentiles = known[0][1].percentiles if known else {}
    heads = ("ms", "mean", *(f"p{wanted:g}" for wanted in percentiles), "max", "std")
    lines = [
        (
            name,
            *(
                f"{value:.2f}"
                for value in (found.mean, *found.percentiles.values(), found.highest, found.std)
            ),
        )
        for name, found in known
    ]
    return heads, lines


def _failures(figures: Figures) -> list[tuple[str, str, str]]:
    return [(failure.kind, str(failure.count), failure.example) for failure in figures.failures]


def _count(value: int | None) -> str:
    return "not counted" if value is None else str(value)


def _pictures(records: Sequence[Record]) -> dict[str, Callable[[Path], None]]:
    """How to draw what the requests have to show, by file."""
    answered = [record for record in records if record.failure is None]
    if not answered:
        return {}
    return {
        "latencies.png": partial(_plot_latencies, answered),
        "latency-over-time.png": partial(_waits, records),
        "load-over-time.png": partial(_load, records),
    }


def _plot_latencies(answered: Sequence[Record], path: Path) -> None:
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
    save_figure(figure, axes, path)


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
    save_figure(figure, axes, path)


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
    save_figure(figure, axes, path)


def _fields(findings: Findings) -> dict[str, Any]:
    """Without the single requests. What vLLM's `bench serve` measures too has its names there."""
    figures = findings.figures
    return {
        "circumstances": findings.conditions,
        **{
            _NAMES_OF_VLLM.get(name, name): value
            for name, value in asdict(figures).items()
            if name != "num_requests" and not name.endswith("_ms")
        },
        **_spread("ttft", figures.ttft_ms),
        **_spread("tpot", figures.tpot_ms),
        **_spread("itl", figures.itl_ms),
        **_spread("e2el", figures.e2el_ms),
        **_spread("scheduled_ttft", figures.scheduled_ttft_ms),
        **_spread("scheduled_e2el", figures.scheduled_e2el_ms),
        **_spread("client_queue", figures.queue_ms),
        **_spread("client_lag", figures.lag_ms),
        "client_cpu_share": findings.client_cpu_share,
    }


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
