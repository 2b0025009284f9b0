"""Report of the protocol, from the results of its phases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from meshbench.report_tools import Line, Report, Section, lines_section, markdown_table
from tests.qualification.gpu_day.scale import phases_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.qualification.gpu_day.runner import PhaseResult
    from tests.qualification.gpu_day.scale import Scale

    Figures = Mapping[str, Any]

_MIB: Final = 2**20
# Of the tokens per second of the whole model in one process, at one session.
_GOAL: Final = 0.9
_GOAL_STAGES: Final = (2, 4)
_MANY_SESSIONS: Final = 32


def markdown(scale: Scale, results: Mapping[str, PhaseResult]) -> str:
    """The report in Markdown; nothing stands in it that was not measured.

    Args:
        scale: Sizes of the run.
        results: Results by name of the phase; some may be missing.
    """
    figures = {name: result.figures for name, result in results.items() if not result.failure}
    card = figures.get("device", {})
    title = f"Stages on {card.get('description', 'a card')}, scale {scale.name}"
    stops = figures.get(f"stops-{scale.stops}", {})
    sections = [
        Section("", _card(card) or "The card is unknown."),
        lines_section("## Goals", goals(scale, figures)),
        *(
            Section(f"## {model}: tokens per second by sessions", _throughput(scale, model, figures))
            for model in scale.shapes
        ),
        Section("## Prefill, tokens per second", _prefill(scale, figures)),
        Section("## Memory of the card, MiB by llama.cpp's log and as foretold", _memory(scale, figures)),
        Section("## Tokens that agree, and mean KL divergence in nats", _parity(scale, figures)),
        Section("## Speculation with drawn acceptance", _speculation(scale, figures)),
        Section("## Experts left to the processor", _experts(scale, figures)),
        Section("## Ways to end a graph, times in ms", stops.get("table", "")),
        Section("## Rows and their batches", _exactness(figures)),
        Section("## Not measured", _missing(scale, results)),
    ]
    return Report(title=title, sections=sections).markdown()


def goals(scale: Scale, figures: Mapping[str, Figures]) -> list[Line]:
    """Goals and what was measured of them; none for a scale without."""
    model = scale.goal
    if model is None:
        return []
    whole = _rate(figures.get(f"whole-{model}"), 1)
    lines = []
    for count in _GOAL_STAGES:
        rate = _rate(figures.get(f"ring-{model}-{count}"), 1)
        lines.append(
            Line(
                f"{model}, one session: {count} stages on one card beside the whole model in one process",
                rate / whole if rate and whole else None,
                _GOAL,
            )
        )
    for count in scale.stage_counts:
        of_ring = figures.get(f"ring-{model}-{count}")
        many, one = _rate(of_ring, _MANY_SESSIONS), _rate(of_ring, 1)
        title = f"{model}: {_MANY_SESSIONS} sessions beside one, {_stages(count)}"
        lines.append(Line(title, many / one if many and one else None, None))
    return lines


def _rate(figures: Figures | None, num_sessions: int) -> float | None:
    """Tokens per second of a phase at so many sessions."""
    rows = () if figures is None else figures["decode"]
    return next((row["tokens_per_s"] for row in rows if row["sessions"] == num_sessions), None)


def _stages(count: int) -> str:
    return "one stage" if count == 1 else f"{count} stages"


def _card(card: Figures) -> str:
    names = {
        "description": "card",
        "backend": "backend",
        "driver": "driver",
        "total_bytes": "memory, bytes",
        "read_gb_per_s": "reads weights at, GB/s",
        "llama_cpp": "llama-cpp-python",
        "spanmesh": "spanmesh",
        "system": "system",
        "python": "Python",
        "num_threads": "threads of the processor",
    }
    table = markdown_table(
        ("", ""), ((title, str(card[name])) for name, title in names.items() if card.get(name))
    )
    log = "\n".join(card.get("llama_cpp_log", ()))
    return "\n\n".join(part for part in (table, f"```text\n{log}\n```" if log else "") if part)


def _throughput(scale: Scale, model: str, figures: Mapping[str, Figures]) -> str:
    of_whole = figures.get(f"whole-{model}")
    of_rings = {count: figures.get(f"ring-{model}-{count}") for count in scale.stage_counts}

    def cells(num_sessions: int) -> Iterator[str]:
        yield str(num_sessions)
        whole = _rate(of_whole, num_sessions)
        yield _number(whole)
        for of_ring in of_rings.values():
            rate = _rate(of_ring, num_sessions)
            share = f" ({rate / whole:.2f})" if rate and whole else ""
            yield _number(rate) + share

    heads = ("sessions", "whole, one process", *map(_stages, of_rings))
    refused = [
        f"- {name}: {reason}"
        for name, phase in (
            ("whole", of_whole),
            *((_stages(count), of_ring) for count, of_ring in of_rings.items()),
        )
        for reason in (phase or {}).get("refused", ())
    ]
    rows = [list(cells(count)) for count in scale.num_sessions]
    table = markdown_table(heads, rows) if any("".join(row[1:]) for row in rows) else ""
    return "\n\n".join(part for part in (table, "\n".join(refused)) if part)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _prefill(scale: Scale, figures: Mapping[str, Figures]) -> str:
    def cells(model: str) -> Iterator[str]:
        yield model
        for name in (f"whole-{model}", *(f"ring-{model}-{count}" for count in scale.stage_counts)):
            yield _number(figures.get(name, {}).get("prefill_tokens_per_s"))

    rows = [list(cells(model)) for model in scale.shapes]
    heads = (f"{scale.num_prefill} tokens", "whole", *map(_stages, scale.stage_counts))
    return markdown_table(heads, [row for row in rows if "".join(row[1:])])


def _memory(scale: Scale, figures: Mapping[str, Figures]) -> str:
    rows = []
    for model in scale.shapes:
        for count in scale.stage_counts:
            memory = figures.get(f"ring-{model}-{count}", {}).get("memory")
            if memory:
                parts = ("weight", "cache", "buffer")
                told = (
                    f"{memory[f'{part}_bytes'] / _MIB:.0f} / {memory[f'foretold_{part}_bytes'] / _MIB:.0f}"
                    for part in parts
                )
                rows.append([model, str(count), *told])
    return markdown_table(("model", "stages", "weights", "KV cache", "buffers"), rows)


def _parity(scale: Scale, figures: Mapping[str, Figures]) -> str:
    found = figures.get(f"parity-{scale.parity}")
    if found is None:
        return ""
    heads = ("model", "compared with the whole model on the card", "tokens", "KL", "bit-equal")
    ways = {
        "stages": f"{len(found['cuts']) + 1} stages on the card",
        "split": "half of the layers on the processor",
        "processor": "the processor alone",
    }
    return markdown_table(
        heads,
        (
            (
                scale.parity,
                title,
                f"{found[way]['num_agreed']}/{found[way]['num_tokens']}",
                f"{found[way]['mean_kl_nats']:.6f}",
                "yes" if found[way]["is_bit_equal"] else "no",
            )
            for way, title in ways.items()
        ),
    )


def _speculation(scale: Scale, figures: Mapping[str, Figures]) -> str:
    found = figures.get(f"speculation-{scale.speculation}")
    if found is None:
        return ""
    heads = ("model", "stages", "plain", "with proposals", "proposed", "accepted", "same text")
    row = (
        scale.speculation,
        str(found["stages"]),
        _number(found["plain_tokens_per_s"]),
        _number(found["tokens_per_s"]),
        str(found["proposed"]),
        str(found["accepted"]),
        f"{found['tokens_agreed']}/{found['tokens']}",
    )
    rates = ", ".join(f"{rate:g}" for rate in found["rates"])
    return f"Acceptance by distance: {rates}.\n\n{markdown_table(heads, [row])}"


def _experts(scale: Scale, figures: Mapping[str, Figures]) -> str:
    found = figures.get(f"experts-{scale.experts}")
    if found is None:
        return ""
    heads = (
        f"{scale.experts}: layers whose experts the processor has",
        "tokens/s",
        "weights on the card, MiB",
        "as foretold",
        "in the host's memory, MiB",
    )
    return markdown_table(
        heads,
        (
            (
                f"{row['cpu_moe_layers']} of {found['layers']}",
                _number(row["tokens_per_s"]),
                f"{row['device_weight_bytes'] / _MIB:.0f}",
                f"{row['foretold_device_weight_bytes'] / _MIB:.0f}",
                f"{row['host_weight_bytes'] / _MIB:.0f}",
            )
            for row in found["rows"]
        ),
    )


def _exactness(figures: Mapping[str, Figures]) -> str:
    settings = figures.get("exactness", {}).get("settings", ())
    return markdown_table(
        ("setting", "rows depend on their batch", "found"),
        ((each["setting"], "no" if each["is_exact"] else "yes", each["found"]) for each in settings),
    )


def _missing(scale: Scale, results: Mapping[str, PhaseResult]) -> str:
    lines = []
    for phase in phases_of(scale):
        result = results.get(phase.name)
        if result is None:
            lines.append(f"- {phase.name}: did not run")
        elif result.failure:
            lines.append(f"- {phase.name}: {result.failure}")
    return "\n".join(lines)
