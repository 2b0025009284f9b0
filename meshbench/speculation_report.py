"""Report of `mesh bench spec`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from meshbench.report_tools import (
    PICTURES,
    PairedRatio,
    Report,
    Section,
    lines_section,
    list_section,
    markdown_table,
    new_figure,
    number,
    save_figure,
)
from meshbench.speculation_acceptance import acceptance_lines, closeness, recommend
from meshbench.speculation_blocks import compared_lines, drafting_table, paired_lines
from meshbench.speculation_features import chat_beside_raw, depths_table, features_lines
from meshbench.speculation_results import (
    LLAMA_RPC,
    MESH,
    OFF,
    Row,
    pairs_with_checkout,
    pairs_with_off,
    rows_of,
)
from meshbench.under_test.links import links_section

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from meshbench.report_tools import Line
    from meshbench.speculation_acceptance import Closeness, Recommendation
    from meshbench.speculation_plan import Preset
    from meshbench.speculation_results import ConcurrentRequests, Results, RunConditions


def speculation_report(results: Results, *, categories: Collection[str], preset: Preset) -> Report:
    """Report of the measurements; good if all could be made.

    Args:
        results: Measurements.
        categories: Names of Spec-Bench's workloads.
        preset: Plan of the run; those with bounds have an acceptance table.
    """
    rows = rows_of(results.samples)
    lines: list[Line] = []
    if preset == "acceptance":
        lines += acceptance_lines(results.samples, rows, results.groups, categories)
    elif preset == "features" and (other := results.conditions.other_draft) is not None:
        lines += compared_lines(results.samples, results.conditions.draft_model or "", other)
    elif preset == "features":
        lines += paired_lines(results.samples) or features_lines(results.samples, categories)
    if results.conditions.other_draft is None:
        lines += _over_checkout(results)
    return Report(
        title="Speculation, measured",
        sections=_sections(results, rows, lines),
        fields=_fields(results, rows, lines),
        is_good=not results.failures,
        pictures=_pictures(rows),
    )


def _sections(results: Results, rows: Sequence[Row], lines: Sequence[Line]) -> list[Section]:
    chat = [row for row in rows if row.place.is_cold_chat]
    warm = [row for row in rows if row.place.is_warm]
    raw = [row for row in rows if row.place.is_raw]
    advice = _recommendation(recommend(rows), results.servers)
    not_measured = "\n".join(f"not measured: {failure}" for failure in results.failures)
    return [
        Section("", _conditions(results)),
        Section("## Warnings", _warnings(results, rows), not_measured),
        list_section("## Not measured from outside", "not measured from outside", results.omitted),
        links_section(results.links),
        lines_section("## Acceptance table", lines),
        Section("## How close `auto` comes to `replay`", _closeness(closeness(rows))),
        Section("## Chat: times faster than off", _speed_ups(chat)),
        Section("## Chat: all figures", _figures(chat)),
        Section("## Warm: asked before, all figures", _figures(warm)),
        Section("## Raw completions, without a chat template: not comparable with chat", _figures(raw)),
        Section("## Acceptance by position, unconditional, and of how many windows", _positions(rows)),
        Section("## Drafting: what it costs and brings", drafting_table(rows)),
        Section("## Acceptance by distance from the drafter's last feature", depths_table(rows)),
        Section("## Chat beside raw completions, each over its own off", chat_beside_raw(rows)),
        Section("## Requests at once", _concurrent(results.groups)),
        Section("## llama.cpp RPC: its settings", _peer(results)),
        PICTURES,
        Section("## Recommended for production", advice, advice),
    ]


def _recommendation(found: Recommendation, servers: Mapping[str, Sequence[str]]) -> str:
    """The choice, its grounds and how to serve it."""
    if found.chosen is None:
        return found.reason
    chosen = found.chosen
    by_delay = ", ".join(f"{speed_up:.2f}× at {delay:g} ms" for delay, speed_up in chosen.speed_ups.items())
    mode, _, width = chosen.setting.partition("/")
    options = ["--speculate", mode, *_without_speculate(servers.get(chosen.server, ()))]
    narrowed = f" with `max_width` {width} in requests" if width else ""
    return (
        f"`mesh serve MODEL {' '.join(options)}`{narrowed}: setting {chosen.setting} on the server "
        f"“{chosen.server}”, {by_delay} of off. {found.reason}"
    )


def _without_speculate(options: Sequence[str]) -> list[str]:
    """Options without those of the setting."""
    kept = list(options)
    if "--speculate" in kept:
        index = kept.index("--speculate")
        del kept[index : index + 2]
    return kept


def _conditions(results: Results) -> str:
    found: RunConditions = results.conditions
    hops = ", ".join(f"{hop:.2f} for {asked:g}" for asked, hop in sorted(results.hops_ms.items()))
    return (
        f"```sh\n{found.command}\n```\n\n"
        f"{_mesh(found)} {found.num_tokens} tokens per answer, {found.numeric_mode} mode, "
        f"seed {found.seed}. "
        f"{found.processor}, {found.num_cores} cores for "
        f"{'all hosts together' if found.url is None else 'the client'}. {found.software}. "
        f"One-way delay measured, in ms: {hops or 'none'}. "
        f"The run took {results.took_s:.0f} s.\n\n"
        "Through the streaming chat endpoint, unless said otherwise. Speed-ups are paired: the same question "
        "under off and under the setting, one right after the other on the same running mesh; means are "
        "arithmetic, each workload weighing the same; an asterisk marks workloads with "
        "degenerate answers. Before the first question at a delay each setting gives an answer that does not "
        "count. First answers only, except where the workload is warm. "
        "Answers go on to the last token asked for; those that go in circles are counted as degenerate."
    )


def _mesh(found: RunConditions) -> str:
    if found.url is not None:
        stages = "; ".join(found.placement)
        return f"{found.model} as served at {found.url}, {found.num_stages} stages: {stages}."
    beside = f" beside {found.other_draft}" if found.other_draft else ""
    return (
        f"{found.model}, draft model {found.draft_model or 'none'}{beside}, {found.num_stages} stage hosts "
        f"and a head without layers, {found.num_threads} thread(s) per stage,"
    )


def _warnings(results: Results, rows: Sequence[Row]) -> str:
    found = [f"- not measured: {failure}" for failure in results.failures]
    found += [
        f"- in exact mode the text differs: {pair.other.setting} on {pair.other.workload} "
        f"{pair.other.question} at {pair.other.delay_ms:g} ms, equal up to {pair.common_share:.0%}"
        for pair in pairs_with_off(results.samples)
        if pair.is_fork and results.is_exact(pair.other.server)
    ]
    circling = sorted({row.place.workload for row in rows if row.degenerate_rate > 0})
    if circling:
        found.append(
            f"- degenerate, repeating answers among: {', '.join(circling)}; they flatter every proposer"
        )
    return "\n".join(found)


def _closeness(shares: Sequence[Closeness]) -> str:
    return markdown_table(
        ("delay, ms", "workload", "server", "auto's tokens/s of replay's"),
        ((f"{found.delay_ms:g}", found.workload, found.server, f"{found.share:.0%}") for found in shares),
    )


def _speed_ups(rows: Sequence[Row]) -> str:
    """A table for each delay: workloads down, settings across, means at the end; `*` marks degenerate."""
    paired = [row for row in rows if row.speed_up is not None and row.place.temperature == 0]
    parts = []
    for delay_ms in sorted({row.place.delay_ms for row in paired}):
        here = [row for row in paired if row.place.delay_ms == delay_ms]
        columns = list(dict.fromkeys((row.place.server, row.place.setting) for row in here))
        by_cell = {(row.place.workload, row.place.server, row.place.setting): row for row in here}
        workloads = list(dict.fromkeys(row.place.workload for row in here))
        lines = [
            (workload, *(_speed_up(by_cell.get((workload, *column))) for column in columns))
            for workload in workloads
        ]
        members = [
            [row for row in here if (row.place.server, row.place.setting) == column] for column in columns
        ]
        lines.append(("**mean**", *(_mean(row.speed_up for row in rows) for rows in members)))
        if any(row.degenerate_rate > 0 for row in here):
            sound = (_mean(row.sound_speed_up for row in rows) for rows in members)
            lines.append(("**mean without degenerate answers**", *sound))
        heads = ("workload", *(f"{setting} ({server})" for server, setting in columns))
        parts.append(f"{delay_ms:g} ms one way:\n\n{markdown_table(heads, lines)}")
    return "\n\n".join(parts)


def _speed_up(row: Row | None) -> str:
    return "" if row is None else number(row.speed_up) + "*" * (row.degenerate_rate > 0)


def _mean(values: Iterable[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"**{fmean(found):.2f}**" if found else ""


def _figures(rows: Sequence[Row]) -> str:
    return markdown_table(
        (
            "delay, ms", "workload", "system", "setting", "T", "answers", "tokens/s", "over off", "from",
            "to", "tokens per window", "accepted per draft", "acceptance", "TTFT, ms", "ITL p50", "p95",
            "p99", "forks", "degenerate",
        ),
        (
            (
                f"{row.place.delay_ms:g}", row.place.workload, row.place.system,
                row.place.label, f"{row.place.temperature:g}",
                str(row.num_answers), f"{row.tokens_per_s:.1f}", number(row.speed_up),
                number(row.speed_up_low), number(row.speed_up_high), number(row.tokens_per_window),
                number(row.mean_accepted), _share(row.acceptance), f"{row.ttft_ms:.0f}",
                *(f"{gap:.1f}" for gap in row.itl_ms), _share(row.fork_rate), _share(row.degenerate_rate),
            )
            for row in rows
        ),
    )  # fmt: skip


def _positions(rows: Sequence[Row]) -> str:
    drafting = [row for row in rows if row.place.system == MESH and row.acceptance_per_position]
    longest = max((len(row.acceptance_per_position) for row in drafting), default=0)
    return markdown_table(
        ("delay, ms", "workload", "setting", *(str(position + 1) for position in range(longest))),
        (
            (
                f"{row.place.delay_ms:g}",
                row.place.workload,
                row.place.label,
                *(
                    f"{share:.2f} ({count})"
                    for share, count in zip(row.acceptance_per_position, row.drafts_per_position, strict=True)
                ),
                *("" for _ in range(longest - len(row.acceptance_per_position))),
            )
            for row in drafting
        ),
    )


def _concurrent(groups: Sequence[ConcurrentRequests]) -> str:
    return markdown_table(
        ("at once", "delay, ms", "setting", "off, total tokens/s", "total tokens/s", "over off", "forks"),
        (
            (
                str(group.num_at_once), f"{group.delay_ms:g}", group.setting, f"{group.off_tokens_per_s:.1f}",
                f"{group.tokens_per_s:.1f}", f"{group.ratio:.2f}", str(group.num_forks),
            )
            for group in groups
        ),
    )  # fmt: skip


def _peer(results: Results) -> str:
    rates = results.peer_rates
    off = rates.get(OFF.name)
    if not rates:
        return ""
    title = (
        f"At {results.peer_delay_ms:g} ms one way; the fastest takes part in the turns above as {LLAMA_RPC}."
    )
    rows = (
        (
            name,
            f"{rate:.1f}" if isinstance(rate, float) else rate,
            f"{rate / off:.2f}" if isinstance(rate, float) and isinstance(off, float) else "",
        )
        for name, rate in rates.items()
    )
    return f"{title}\n\n{markdown_table(('setting', 'tokens/s', 'over its own off'), rows)}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _pictures(rows: Sequence[Row]) -> dict[str, Callable[[Path], None]]:
    """How to draw what the rows have to show, by file."""
    paired = [
        row
        for row in rows
        if row.place.system == MESH
        and row.place.temperature == 0
        and row.place.is_cold_chat
        and row.speed_up is not None
    ]
    drawn: dict[str, Callable[[Path], None]] = {}
    if paired:
        drawn["speed-up-by-delay.png"] = partial(_by_delay, paired)
        drawn["speed-up-by-workload.png"] = partial(_by_workload, paired)
    if any(row.acceptance_per_position for row in paired):
        drawn["acceptance-by-position.png"] = partial(_by_position, paired)
    return drawn


def _by_delay(rows: Sequence[Row], path: Path) -> None:
    """Mean over workloads."""
    figure, axes = new_figure("one-way delay, ms", "times faster than off, mean over workloads")
    for label in dict.fromkeys(row.place.label for row in rows):
        mine = [row for row in rows if row.place.label == label]
        delays = sorted({row.place.delay_ms for row in mine})
        means = [
            fmean(row.speed_up for row in mine if row.place.delay_ms == delay and row.speed_up is not None)
            for delay in delays
        ]
        axes.plot(delays, means, marker="o", label=label)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    save_figure(figure, axes, path)


def _by_workload(rows: Sequence[Row], path: Path) -> None:
    """Bars, at the longest delay."""
    delay_ms = max(row.place.delay_ms for row in rows)
    here = [row for row in rows if row.place.delay_ms == delay_ms]
    workloads = list(dict.fromkeys(row.place.workload for row in here))
    labels = list(dict.fromkeys(row.place.label for row in here))
    figure, axes = new_figure("", f"times faster than off at {delay_ms:g} ms")
    width = 0.8 / len(labels)
    for index, label in enumerate(labels):
        heights = {row.place.workload: row.speed_up for row in here if row.place.label == label}
        places = [number + (index - (len(labels) - 1) / 2) * width for number in range(len(workloads))]
        axes.bar(places, [heights.get(name) or 0.0 for name in workloads], width, label=label)
    axes.set_xticks(range(len(workloads)), workloads, rotation=45, ha="right")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    save_figure(figure, axes, path)


def _by_position(rows: Sequence[Row], path: Path) -> None:
    """Mean over workloads and delays."""
    figure, axes = new_figure("position in the window", "accepted up to here, share of windows")
    for label in dict.fromkeys(row.place.label for row in rows):
        curves = [row.acceptance_per_position for row in rows if row.place.label == label]
        longest = max(map(len, curves))
        means = [
            fmean(curve[position] for curve in curves if len(curve) > position) for position in range(longest)
        ]
        axes.plot(range(1, longest + 1), means, marker="o", label=label)
    axes.set_ylim(0, 1)
    save_figure(figure, axes, path)


def _over_checkout(results: Results) -> list[Line]:
    """Rates under each setting over those of another checkout, which answered the same questions."""
    lines = []
    for (other, delay_ms, setting), pairs in sorted(pairs_with_checkout(results.samples).items()):
        rates = [(pair.other.tokens_per_s, pair.base.tokens_per_s) for pair in pairs]
        forks = sum(pair.is_fork for pair in pairs)
        note = f"{len(pairs)} turns, {forks} texts differ"
        title = f"tokens/s under {setting} at {delay_ms:g} ms"
        lines += PairedRatio.of(rates).lines(title, other, note)
    return lines


def _fields(results: Results, rows: Sequence[Row], lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "circumstances": results.conditions,
        "took_s": results.took_s,
        "hops_ms": results.hops_ms,
        "servers": results.servers,
        "acceptance": [_floor(line) for line in lines],
        "auto_of_replay": closeness(rows),
        "recommendation": recommend(rows),
        "rows": rows,
        "crowds": [{**asdict(group), "ratio": group.ratio} for group in results.groups],
        "llama_cpp_rpc": {"delay_ms": results.peer_delay_ms, "tokens_per_s": results.peer_rates},
        "failures": results.failures,
        "links": None if results.links is None else results.links.found,
        "not_measured_from_outside": results.omitted,
        "samples": [
            {**asdict(sample), "tokens_per_s": sample.tokens_per_s, "ttft_ms": sample.ttft_ms}
            for sample in results.samples
        ],
    }


def _floor(line: Line) -> dict[str, Any]:
    """A line with the names that this report has had from its first version."""
    verdict = "reached" if line.verdict == "met" else line.verdict
    return {
        "title": line.title,
        "measured": line.measured,
        "target": line.wanted,
        "note": line.note,
        "verdict": verdict,
    }
