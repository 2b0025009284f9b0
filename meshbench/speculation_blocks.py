"""Drafters of several tokens, in `mesh bench spec`: published acceptance, paired rounds, cost of blocks.

Few have weights for the served model, and random ones are hardly ever right. So their cost and what they do
without being right are measured with such a file, and what acceptance is worth with the same file, whose
drafts are replaced, after they have been computed, by recorded answers with wrong tokens among them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from mesh.draft.drafter import read_drafter
from meshbench.report_tools import Line, PairedRatio, markdown_table, number
from meshbench.speculation_features import WITH_FEATURES
from meshbench.speculation_results import (
    AUTO,
    DRAFT,
    MESH,
    OFF,
    OFF_AGAIN,
    REPLAY,
    WITH_RATES,
    pairs_with_checkout,
    pairs_with_off,
)
from meshbench.speculation_workloads import is_degenerate
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from meshbench.speculation_results import Pair, Row, Sample

# Share of blocks that have a position accepted, unconditional, by name of the kind.
_PUBLISHED: Final = {
    # Qwen3.6-35B-A3B: speculators, issue 613.
    "dflash": (0.84, 0.75, 0.70, 0.65),
    # Card of the drafter for Qwen3-8B, coding at temperature 1.
    "dspark": (0.61, 0.34, 0.19, 0.10, 0.05),
    # Qwen3.8-27B in llama.cpp: 2.2 to 3.3 tokens a verdict (z-lab/dflash, issue 170), best with 4
    # tokens a block; nothing is published by position. Even rates that bring the middle, 2.75.
    "dflash2": (0.70, 0.49, 0.34, 0.24),
    # Gemma 4 26B-A4B: spark-vllm-docker, issue 343.
    "assistant": (0.84, 0.60, 0.39, 0.27),
}
# Settings of paired rounds, by server, with their titles.
_SETTINGS: Final = {
    WITH_FEATURES: {AUTO.name: "auto with drafter", DRAFT.name: "drafter alone"},
    WITH_RATES: {REPLAY.name: "drafts of given acceptance"},
}
# Workload of the questions of paired rounds.
PAIRED: Final = "paired rounds"


def published_rates(drafter: Path, target: Path) -> tuple[float, ...] | None:
    """Acceptance by position of drafters of this file's kind, given that all before is accepted.

    Args:
        drafter: The drafter's file.
        target: The model that it drafts for.

    Returns:
        None for kinds whose drafts are not measured in paired rounds.

    Raises:
        InvalidModel: If the file is no drafter for this model.
    """
    shares = _PUBLISHED.get(read_drafter(drafter, read_model_facts(target)).kind.proposer)
    return None if shares is None else conditional(shares)


def conditional(shares: Sequence[float]) -> tuple[float, ...]:
    """Acceptance by position, given that all before is accepted, of unconditional ones."""
    return tuple(round(later / earlier, 4) for earlier, later in pairwise((1.0, *shares)))


def paired_lines(samples: Iterable[Sample]) -> tuple[Line, ...]:
    """Ratios of rates to those of plain decoding in paired rounds; none of a run without such rounds.

    A setting is not slower if its ratio is no lower than what plain decoding shows against itself: the lower
    bound of that interval, or 1.
    """
    pairs = [pair for pair in pairs_with_off(samples) if pair.other.workload == PAIRED]
    lines = []
    for server, settings in _SETTINGS.items():
        mine = [pair for pair in pairs if pair.other.server == server]
        for delay_ms in sorted({pair.other.delay_ms for pair in mine}):
            here = [pair for pair in mine if pair.other.delay_ms == delay_ms]
            noise = _ratio(here, OFF_AGAIN.name)
            floor = None if noise is None else round(min(1.0, noise.low), 3)
            where = f"over off, {delay_ms:g} ms"
            lines.append(_line(f"off again ({server}) {where}", here, OFF_AGAIN.name, None))
            lines += [_line(f"{title} {where}", here, setting, floor) for setting, title in settings.items()]
    return tuple(lines)


def compared_lines(samples: Sequence[Sample], own: str, other: str) -> tuple[Line, ...]:
    """Two drafters in paired rounds: each over plain decoding of its own mesh, and the one over the other.

    Args:
        samples: All that were measured.
        own: Name of the drafter of the mesh under test.
        other: Name of the other mesh, and of its drafter.
    """
    together = pairs_with_checkout(samples)
    lines = []
    for delay_ms in sorted({delay_ms for _, delay_ms, _ in together}):
        at = f"{delay_ms:g} ms"
        # Of plain decoding it shows how alike the two meshes are.
        for setting, title in ((OFF.name, "off"), *_SETTINGS[WITH_FEATURES].items()):
            pairs = together.get((other, delay_ms, setting), [])
            lines.append(_line(f"{title}: {own} over {other}, {at}", pairs, setting, None))
        for name, system in ((other, other), (own, MESH)):
            here = [pair for pair in pairs_with_off(samples, system) if pair.other.delay_ms == delay_ms]
            lines += [
                _line(f"{title}: {name} over off, {at}", here, setting, None)
                for setting, title in _SETTINGS[WITH_FEATURES].items()
            ]
    return tuple(lines)


def drafting_table(rows: Iterable[Row]) -> str:
    """What drafting costs and brings, by setting.

    A draft brings one token, and as many as are accepted of it: of drafters that read features the sum of
    acceptance by distance, over windows in flight.
    """
    return markdown_table(
        (
            *("delay, ms", "workload", "setting", "tokens a pass", "ms a pass", "ms a drafted token"),
            *("tokens a draft brings", "tokens per window", "over off"),
        ),
        (
            (
                f"{row.place.delay_ms:g}",
                row.place.workload,
                row.place.label,
                number(row.tokens_per_pass),
                number(row.pass_ms),
                number(row.pass_ms / row.tokens_per_pass),
                number(1 + sum(row.by_depth.acceptance()) if row.by_depth.proposed else None),
                number(row.tokens_per_window),
                number(row.speed_up),
            )
            for row in rows
            if row.tokens_per_pass is not None and row.pass_ms is not None
        ),
    )


def _line(title: str, pairs: Sequence[Pair], setting: str, wanted: float | None) -> Line:
    found = _ratio(pairs, setting)
    if found is None:
        return Line(title, None, wanted)
    note = f"{found.low:.3f} to {found.high:.3f} in {len(_sound(pairs, setting))} rounds"
    return Line(title, found.ratio, wanted, note=note)


def _ratio(pairs: Sequence[Pair], setting: str) -> PairedRatio | None:
    found = _sound(pairs, setting)
    if not found:
        return None
    return PairedRatio.of([(pair.other.tokens_per_s, pair.base.tokens_per_s) for pair in found])


def _sound(pairs: Sequence[Pair], setting: str) -> list[Pair]:
    """Those of a setting of which neither answer goes in circles, which would flatter it."""
    return [
        pair
        for pair in pairs
        if pair.other.setting == setting
        and not (is_degenerate(pair.base.text) or is_degenerate(pair.other.text))
    ]
