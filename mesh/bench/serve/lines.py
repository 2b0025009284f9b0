"""The report in words, for a page and for a terminal. Pure."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from mesh.bench.markdown_table import markdown_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.bench.serve.figures import Figures
    from mesh.bench.serve.report import Report

# A client that is later than this with its requests, or busier for long, has measured itself too.
_NOTABLE_LAG_MS: Final = 20.0
_NOTABLE_CPU_SHARE: Final = 0.5
_LONG_S: Final = 1.0


def as_markdown(report: Report, plots: Sequence[str]) -> str:
    """The whole page.

    Args:
        report: What to say.
        plots: Names of the picture files beside the page.
    """
    sections = [
        ("# A server under load, measured", _circumstances(report)),
        ("## Warnings", "\n".join(f"- {warning}" for warning in warnings(report))),
        ("## Requests and rates", markdown_table(("what", "measured"), _rates(report))),
        ("## Latencies, ms", markdown_table(*_latencies(report))),
        ("", _definitions()),
        ("## Failures", markdown_table(("kind", "requests", "the first said"), _failures(report.figures))),
        ("## Pictures", "\n\n".join(f"![{name}]({name})" for name in plots)),
    ]
    return "\n\n".join(f"{title}\n\n{body}".strip() for title, body in sections if body) + "\n"


def as_text(report: Report) -> str:
    """For a terminal."""
    heads, latencies = _latencies(report)
    parts = [
        _columns(_rates(report)),
        _columns([heads, *latencies]) if latencies else "",
        _columns(_failures(report.figures)),
        "\n".join(f"warning: {warning}" for warning in warnings(report)),
    ]
    return "\n\n".join(part for part in parts if part)


def warnings(report: Report) -> list[str]:
    """What a reader of the figures should know."""
    figures, circumstances = report.figures, report.circumstances
    found = []
    if figures.num_requests < circumstances.num_planned:
        found.append(f"interrupted: {figures.num_requests} of {circumstances.num_planned} requests were sent")
    if figures.num_without_usage:
        found.append(
            f"{figures.num_without_usage} answers came without `usage`: their streamed parts are counted as "
            "tokens, too few where a part holds several, and their input is not counted"
        )
    if circumstances.ignore_eos and figures.num_stopped_early:
        found.append(
            f"{figures.num_stopped_early} answers ended before the last token: the server does not know "
            "`ignore_eos`, so answers differ in length"
        )
    if circumstances.num_prompts < figures.num_requests:
        found.append(
            f"{figures.num_requests} requests out of {circumstances.num_prompts} prompts: a cache of "
            "prefixes flatters whatever is asked twice"
        )
    if figures.lag_ms is not None and figures.lag_ms.highest > _NOTABLE_LAG_MS:
        found.append(
            f"this client was up to {figures.lag_ms.highest:.0f} ms late with its requests: its machine is "
            "too busy, and the server looks slower than it is"
        )
    if report.client_cpu_share > _NOTABLE_CPU_SHARE and figures.duration_s >= _LONG_S:
        found.append(
            f"this client used {report.client_cpu_share:.0%} of a core: run it on another machine than the "
            "server's"
        )
    return found


def _circumstances(report: Report) -> str:
    found = report.circumstances
    temperature = "the server's own" if found.temperature is None else f"{found.temperature:g}"
    extra = f" Further fields: `{found.extra_body}`." if found.extra_body else ""
    return (
        f"{found.url}, {found.endpoint} endpoint, model {found.model}. "
        f"{found.loop[0].upper()}{found.loop[1:]}, {found.num_planned} requests after {found.num_warmup} to "
        f"warm up; {found.prompts}; at most {found.max_tokens} tokens per answer"
        f"{', end of text ignored' if found.ignore_eos else ''}; temperature {temperature}; seed "
        f"{found.seed}.{extra} {found.software}, {found.started_at}."
    )


def _rates(report: Report) -> list[tuple[str, str]]:
    figures = report.figures
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
        ("Total token throughput, tokens/s", _number(figures.total_token_throughput)),
        *_goodput(report),
        ("Concurrency, mean", f"{figures.mean_concurrency:.2f}"),
        ("Concurrency, peak", str(figures.max_concurrency)),
        ("CPU used by this client, cores", f"{report.client_cpu_share:.2f}"),
    ]


def _rejected(figures: Figures) -> str:
    waits = ", ".join(f"{wait} ({count})" for wait, count in sorted(figures.retry_after.items()))
    return f"{figures.rejected}{f'; Retry-After, s: {waits}' if waits else ''}"


def _goodput(report: Report) -> list[tuple[str, str]]:
    figures = report.figures
    if figures.request_goodput is None or figures.good_share is None:
        return []
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in report.circumstances.goodput.items())
    lines = [(f"Request goodput ({limits}), requests/s", f"{figures.request_goodput:.2f}")]
    lines.append(("  share of all requests", f"{figures.good_share:.1%}"))
    if report.circumstances.rate is not None and figures.scheduled_good_share is not None:
        lines.append(("  counted from the schedule", f"{figures.scheduled_good_share:.1%}"))
    return lines


def _latencies(report: Report) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows; a closed loop has no schedule to count from."""
    figures = report.figures
    rows = [
        ("TTFT", figures.ttft_ms),
        ("TPOT", figures.tpot_ms),
        ("ITL", figures.itl_ms),
        ("E2EL", figures.e2el_ms),
    ]
    if report.circumstances.rate is not None:
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


def _definitions() -> str:
    return (
        "TTFT, time to first token: from sending the request to the first part of its answer. TPOT, time "
        "per output token: (E2EL − TTFT) / (output tokens − 1), of each answer. ITL, inter-token latency: "
        "from each part to the next, of all answers together; a part may hold several tokens. E2EL, "
        "end-to-end latency: from sending the request to the end of its answer. What counts from the "
        "schedule begins when the request was to be sent. Latencies are those of completed requests; rates "
        "are over the whole run, and shares are of all requests, failed and rejected ones too."
    )


def _failures(figures: Figures) -> list[tuple[str, str, str]]:
    return [(failure.kind, str(failure.count), failure.example) for failure in figures.failures]


def _columns(lines: Sequence[Sequence[str]]) -> str:
    """Aligned: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 or index == len(line) - 1 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _count(value: int | None) -> str:
    return "not counted" if value is None else str(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
