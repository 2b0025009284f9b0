"""One row of a table: what a setting did for a workload at a delay. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

import numpy as np

from mesh.bench.spec.degenerate import is_degenerate
from mesh.bench.spec.pairs import pairs_with_off
from mesh.bench.spec.sample import MESH, add_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.bench.spec.pairs import Pair
    from mesh.bench.spec.sample import Sample


_MODES: Final = ("off", "ngram", "draft", "auto", "replay")


@dataclass(frozen=True)
class Place:
    """What the samples of a row have in common; see `Sample`."""

    is_raw: bool
    is_warm: bool
    delay_ms: float
    temperature: float
    workload: str
    system: str
    server: str
    setting: str

    @classmethod
    def of(cls, sample: Sample) -> Place:
        """Where a sample belongs."""
        return cls(**{name: getattr(sample, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Row:
    """Means over the answers of one place.

    Attributes:
        place: What was measured.
        num_answers: How many.
        tokens_per_s: Mean decode rate.
        speed_up: Mean over the pairs with `off`; None for `off` itself and for other systems.
        speed_up_low: Of the slowest pair.
        speed_up_high: Of the fastest pair.
        sound_speed_up: Mean over the pairs of which neither answer goes in circles; None without any.
        fork_rate: Share of the answers whose text differs from that of `off`; None like `speed_up`.
        degenerate_rate: Share of the answers that go in circles.
        ttft_ms: Median.
        itl_ms: 50th, 95th and 99th percentile over all gaps between arrivals.
        tokens_per_window: Tokens that a pass through the target brought, plain passes too; None if unknown.
        mean_accepted: Accepted tokens of a pass that carried proposed ones; None if unknown.
        acceptance: Accepted of all proposed tokens, in [0, 1]; None if none was proposed.
        acceptance_per_position: Entry `i`: of the passes with more than `i` proposed tokens, the share that
            had all up to there accepted; unconditional: what lies behind a rejected token counts as rejected.
        drafts_per_position: Entry `i`: how many passes that is a share of.
    """

    place: Place
    num_answers: int
    tokens_per_s: float
    speed_up: float | None
    speed_up_low: float | None
    speed_up_high: float | None
    sound_speed_up: float | None
    fork_rate: float | None
    degenerate_rate: float
    ttft_ms: float
    itl_ms: tuple[float, float, float]
    tokens_per_window: float | None
    mean_accepted: float | None
    acceptance: float | None
    acceptance_per_position: tuple[float, ...]
    drafts_per_position: tuple[int, ...]


def rows_of(samples: Sequence[Sample]) -> tuple[Row, ...]:
    """A row for every place: workloads in the order measured, `off` first and `replay` last in each."""
    pairs: dict[Place, list[Pair]] = {}
    for pair in pairs_with_off(samples):
        pairs.setdefault(Place.of(pair.other), []).append(pair)
    places: dict[Place, list[Sample]] = {}
    for sample in samples:
        places.setdefault(Place.of(sample), []).append(sample)
    workloads = list(dict.fromkeys(place.workload for place in places))
    in_order = sorted(
        places, key=lambda place: (place.delay_ms, workloads.index(place.workload), _rank(place))
    )
    return tuple(_row(place, places[place], pairs.get(place, [])) for place in in_order)


def mean_speed_up(rows: Sequence[Row], is_wanted: Callable[[Place], bool]) -> float | None:
    """Arithmetic mean over the rows wanted, so that each workload weighs the same; None without any."""
    found = [row.speed_up for row in rows if row.speed_up is not None and is_wanted(row.place)]
    return fmean(found) if found else None


def _rank(place: Place) -> tuple[bool, float, str, int, int]:
    mode, _, width = place.setting.partition("/")
    rank = _MODES.index(mode) if mode in _MODES else len(_MODES)
    number = int(width) if width.isdigit() else 0
    return place.system != MESH, place.temperature, place.server, rank, number


def _row(place: Place, samples: Sequence[Sample], pairs: Sequence[Pair]) -> Row:
    speed_ups = [pair.speed_up for pair in pairs]
    sound = [
        pair.speed_up
        for pair in pairs
        if not (is_degenerate(pair.base.text) or is_degenerate(pair.other.text))
    ]
    gaps_ms = [gap for sample in samples for gap in sample.gaps_ms]
    low, middle, high = np.percentile(gaps_ms, [50, 95, 99]) if gaps_ms else (0.0, 0.0, 0.0)
    counts = [sample.counts for sample in samples]
    num_windows = sum(count.num_windows for count in counts)
    num_drafts = sum(count.num_drafts for count in counts)
    num_drafted = sum(count.num_drafted for count in counts)
    num_accepted = sum(count.num_accepted for count in counts)
    drafted = add_up(count.drafted_per_position for count in counts)
    accepted = add_up(count.accepted_per_position for count in counts)
    num_tokens = sum(sample.num_tokens for sample in samples)
    return Row(
        place=place,
        num_answers=len(samples),
        tokens_per_s=fmean(sample.tokens_per_s for sample in samples),
        speed_up=fmean(speed_ups) if speed_ups else None,
        speed_up_low=min(speed_ups, default=None),
        speed_up_high=max(speed_ups, default=None),
        sound_speed_up=fmean(sound) if sound else None,
        fork_rate=fmean(pair.is_fork for pair in pairs) if pairs else None,
        degenerate_rate=fmean(is_degenerate(sample.text) for sample in samples),
        ttft_ms=median(sample.ttft_ms for sample in samples),
        itl_ms=(float(low), float(middle), float(high)),
        # The first token of an answer comes with the prompt, not with a window.
        tokens_per_window=(num_tokens - len(samples)) / num_windows if num_windows else None,
        mean_accepted=num_accepted / num_drafts if num_drafts else None,
        acceptance=num_accepted / num_drafted if num_drafted else None,
        acceptance_per_position=tuple(
            part / whole for part, whole in zip_longest(accepted, drafted, fillvalue=0) if whole
        ),
        drafts_per_position=drafted,
    )
