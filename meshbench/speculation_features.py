"""Drafters that read hidden states, in `mesh bench spec`: bounds, acceptance by depth, chat beside raw text.

Degenerate answers flatter every proposer. They are left out of the lines here, and counted.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Final

from meshbench.report_tools import Line, markdown_table, number
from meshbench.speculation_results import (
    AUTO,
    DRAFT,
    NGRAM,
    OFF_AGAIN,
    REPLAY,
    WITH_RATES,
    Pair,
    pairs_with_off,
)
from meshbench.speculation_workloads import CHAT, RAW_END, is_degenerate

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from meshbench.speculation_results import Row, Sample

# Name of the server that the plan starts with the drafter.
WITH_FEATURES: Final = "auto with drafter"

# What the cost model foretells for three stages on processors, drafting 0.7 ms a token and acceptance of .75,
# .72, .70 …: tokens per second over plain, in flight and in step at its best, by delay in ms.
_ESTIMATES: Final = {0.1: (1.93, 0.67), 5.0: (2.74, 1.27), 20.0: (3.13, 1.97)}


def features_lines(samples: Sequence[Sample], categories: Collection[str]) -> tuple[Line, ...]:
    """The bounds of drafters that read hidden states.

    Args:
        samples: All that were measured.
        categories: Names of Spec-Bench's workloads among those measured.
    """
    pairs = [pair for pair in pairs_with_off(samples) if pair.other.server == WITH_FEATURES]
    lines = [
        _mean(
            f"drafter over off, chat, {delay_ms:g} ms",
            _of(pairs, DRAFT.name, delay_ms, {*CHAT} & {*categories}),
            wanted,
        )
        for delay_ms, wanted in ((5.0, 1.10), (20.0, 1.25))
    ]
    lines += [
        _mean(
            f"auto with drafter over n-gram alone, all categories, {delay_ms:g} ms",
            _against_ngram(samples, delay_ms, categories),
            wanted,
        )
        for delay_ms, wanted in ((5.0, None), (20.0, 1.03))
    ]
    auto, again = (_of(pairs, name, 0.1, categories) for name in (AUTO.name, OFF_AGAIN.name))
    lines.append(_mean("auto with drafter over off, mean of all categories, 0.1 ms", auto, 0.97))
    noise = _by_workload(again)
    floor = round(min(noise.values()) - 0.03, 2) if noise else None
    lines.append(_mean("off again over off, mean of all categories, 0.1 ms", again, None))
    lines.append(_lowest("auto with drafter over off, lowest category, 0.1 ms", auto, floor))
    return (*lines, *_replayed([pair for pair in pairs_with_off(samples) if pair.other.server == WITH_RATES]))


def _replayed(pairs: Sequence[Pair]) -> list[Line]:
    """In flight, and over the best in step: what a drafter of the given acceptance would win."""
    lines = []
    for delay_ms, (flight, step) in _ESTIMATES.items():
        here = [pair for pair in pairs if pair.other.delay_ms == delay_ms]
        ours = _of(here, REPLAY.name, delay_ms, None)
        steps = {
            name: fmean(found.values())
            for name in sorted({pair.other.setting for pair in here} - {REPLAY.name})
            if (found := _by_workload(_of(here, name, delay_ms, None)))
        }
        name = max(steps, key=lambda name: steps[name], default=None)
        rate = fmean(found.values()) if (found := _by_workload(ours)) else None
        at = f"replay of given acceptance, {delay_ms:g} ms"
        lines.append(
            Line(
                f"{at}: in flight over off",
                rate,
                2.0 if delay_ms == 5.0 else None,
                note=f"foretold: {flight:.2f}",
            )
        )
        lines.append(
            Line(
                f"{at}: in flight over the best in step",
                None if name is None or rate is None else rate / steps[name],
                1.3 if delay_ms == 5.0 else None,
                note=f"foretold: {flight / step:.2f}"
                + ("" if name is None else f"; best: {name}, {steps[name]:.2f} of off"),
            )
        )
    return lines


def depths_table(rows: Iterable[Row]) -> str:
    """Acceptance by distance from the drafter's last feature, of how many tokens; and features received."""
    drafting = [row for row in rows if row.by_depth.proposed]
    longest = max((len(row.by_depth.proposed) for row in drafting), default=0)
    lines = []
    for row in drafting:
        found, features = row.by_depth, row.features
        for what, shares, counts in (
            ("unconditional", found.acceptance(), found.proposed),
            ("conditional", found.conditional_acceptance(), found.reached),
        ):
            cells = [f"{share:.2f} ({count})" for share, count in zip(shares, counts, strict=False)]
            received = (
                f"{features.num_received} of {features.num_wanted}, {features.num_bytes / 1e6:.1f} MB"
                if features is not None and what == "unconditional"
                else ""
            )
            place = row.place
            where = (f"{place.delay_ms:g}", place.workload, place.label, what, received)
            lines.append((*where, *cells, *("" for _ in range(longest - len(cells)))))
    heads = ("delay, ms", "workload", "setting", "acceptance", "features received")
    return markdown_table((*heads, *(str(depth + 1) for depth in range(longest))), lines)


def chat_beside_raw(rows: Sequence[Row]) -> str:
    """Each workload through the chat template and without it, each against its own `off`."""
    by_place = {
        (row.place.workload, row.place.delay_ms, row.place.setting, row.place.server): row
        for row in rows
        if row.speed_up is not None and not row.place.is_warm and row.place.temperature == 0
    }
    lines = []
    for (workload, *where), chat in by_place.items():
        raw = by_place.get((f"{workload}{RAW_END}", *where))  # type: ignore[arg-type]
        if raw is not None:
            lines.append(
                (
                    f"{chat.place.delay_ms:g}",
                    workload,
                    chat.place.setting,
                    *_side(chat),
                    *_side(raw),
                )
            )
    heads = ("delay, ms", "workload", "setting")
    sides = (f"{side}: {figure}" for side in ("chat", "raw") for figure in ("over off", "acceptance"))
    return markdown_table((*heads, *sides), lines)


def _side(row: Row) -> tuple[str, str]:
    acceptance = "" if row.acceptance is None else f"{row.acceptance:.0%}"
    return number(row.speed_up) + "*" * (row.degenerate_rate > 0), acceptance


def _of(
    pairs: Iterable[Pair], setting: str, delay_ms: float, names: Collection[str] | None
) -> tuple[Pair, ...]:
    return tuple(
        pair
        for pair in pairs
        if (pair.other.setting, pair.other.delay_ms) == (setting, delay_ms)
        and (names is None or pair.other.workload in names)
    )


def _against_ngram(
    samples: Iterable[Sample], delay_ms: float, categories: Collection[str]
) -> tuple[Pair, ...]:
    """Each answer under `auto`, with that of n-grams alone of the same turn."""
    pairs = [pair for pair in pairs_with_off(samples) if pair.other.server == WITH_FEATURES]
    ngram = {pair.other.turn: pair.other for pair in _of(pairs, NGRAM.name, delay_ms, categories)}
    return tuple(
        Pair(ngram[pair.other.turn], pair.other)
        for pair in _of(pairs, AUTO.name, delay_ms, categories)
        if pair.other.turn in ngram
    )


def _by_workload(pairs: Iterable[Pair]) -> Mapping[str, float]:
    """Mean of each workload, without degenerate answers."""
    found: dict[str, list[float]] = {}
    for pair in pairs:
        if _is_sound(pair):
            found.setdefault(pair.other.workload, []).append(pair.speed_up)
    return {name: fmean(values) for name, values in found.items()}


def _is_sound(pair: Pair) -> bool:
    return not (is_degenerate(pair.base.text) or is_degenerate(pair.other.text))


def _mean(title: str, pairs: Sequence[Pair], wanted: float | None) -> Line:
    found = _by_workload(pairs)
    return Line(title, fmean(found.values()) if found else None, wanted, note=_counted(pairs))


def _lowest(title: str, pairs: Sequence[Pair], wanted: float | None) -> Line:
    found = _by_workload(pairs)
    if not found:
        return Line(title, None, wanted)
    name = min(found, key=lambda name: found[name])
    return Line(title, found[name], wanted, note=f"{name}; {_counted(pairs)}")


def _counted(pairs: Sequence[Pair]) -> str:
    num_sound = sum(map(_is_sound, pairs))
    return f"{num_sound} questions, {len(pairs) - num_sound} more with degenerate answers left out"
