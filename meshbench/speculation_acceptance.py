"""Acceptance table and recommendation of `mesh bench spec`."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING, Final

from meshbench.report_tools import (
    Line,
)
from meshbench.speculation_results import (
    AUTO,
    DRAFT,
    MESH,
    OFF,
    OFF_AGAIN,
    REPLAY,
    WITH_RATES,
    mean_speed_up,
    median_ratio,
    pairs_with_off,
    pairs_with_rpc,
)
from meshbench.speculation_workloads import CHAT, CODING, WARM_REPEAT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from meshbench.speculation_results import ConcurrentRequests, Pair, Place, Row, Sample

# Names of the servers that the acceptance plan starts.
WITH_DRAFT: Final = "auto with draft"
WITHOUT_DRAFT: Final = "auto without draft"
WITH_HISTORY: Final = "auto with history"
EXACT: Final = "exact with draft"
NEVER_BELOW: Final = 0.97
# What a single workload may lose at most for the sake of the others.
_FLOOR: Final = 0.97


@dataclass(frozen=True)
class Closeness:
    """Share of the ceiling that `auto` reached."""

    delay_ms: float
    """One way."""
    workload: str
    """Its name."""
    server: str
    """How the server was started that answered under `auto`."""
    share: float
    """`auto`'s rate as a share of `replay`'s, from the same run."""


@dataclass(frozen=True)
class Candidate:
    """A setting on a server, judged by cold chat workloads."""

    server: str
    """How the server was started."""
    setting: str
    """Name of the setting."""
    speed_ups: dict[float, float]
    """By delay, the mean over workloads."""
    worst: float
    """The smallest mean of a workload at any delay."""
    worst_at: str
    """Which that is."""

    @property
    def score(self) -> float:
        """Geometric mean over delays: a setting for all of them."""
        return geometric_mean(self.speed_ups.values())


@dataclass(frozen=True)
class Recommendation:
    """The choice and its grounds."""

    chosen: Candidate | None
    """None if it is best to leave speculation off, or if nothing was measured."""
    candidates: tuple[Candidate, ...]
    """All, best first."""
    reason: str
    """One sentence."""


def acceptance_lines(
    samples: Sequence[Sample],
    rows: Sequence[Row],
    groups: Sequence[ConcurrentRequests],
    categories: Collection[str],
) -> tuple[Line, ...]:
    """The table of floors.

    Args:
        samples: All that were measured.
        rows: Made of them.
        groups: Requests at once.
        categories: Names of Spec-Bench's workloads among those measured.
    """

    def mean(server: str, setting: str, delay_ms: float, names: Collection[str]) -> float | None:
        return mean_speed_up(rows, _cold(server, setting, delay_ms, names))

    all_names = {row.place.workload for row in rows}
    lines = [
        Line(
            f"replay over off, mean of all workloads, {delay:g} ms",
            mean(WITH_DRAFT, REPLAY.name, delay, all_names),
            target,
        )
        for delay, target in ((5.0, 6.0), (20.0, 18.0))
    ]
    lines += [
        Line(
            f"draft over off, mean of chat and coding, {delay:g} ms",
            _mean_of([mean(WITH_DRAFT, DRAFT.name, delay, group) for group in (CHAT, CODING)]),
            target,
        )
        for delay, target in ((5.0, 1.7), (20.0, 2.8))
    ]
    lines += [
        Line(
            "auto over off, mean of all Spec-Bench categories, 20 ms",
            mean(WITH_DRAFT, AUTO.name, 20.0, categories),
            2.5,
        ),
        Line(
            "auto over llama.cpp RPC at its best, mean of all Spec-Bench categories, 20 ms",
            _over_rpc(samples, 20.0, categories),
            1.6,
        ),
        Line(
            "auto without a draft model over off, warm-repeat with history, 5 ms",
            mean_speed_up(
                rows,
                lambda place: (
                    (place.server, place.workload, place.setting, place.delay_ms)
                    == (WITH_HISTORY, WARM_REPEAT, AUTO.name, 5.0)
                ),
            ),
            4.0,
        ),
        Line(
            "auto without a draft model over off, mean of all Spec-Bench categories, 5 ms",
            mean(WITHOUT_DRAFT, AUTO.name, 5.0, categories),
            1.2,
        ),
    ]
    for delay_ms in (0.1, 5.0, 20.0):
        lines.append(_worst(rows, AUTO.name, delay_ms, {*categories, "random-token"}, NEVER_BELOW))
    lines.append(_worst(rows, OFF_AGAIN.name, 0.1, {*categories, "random-token"}, None))
    lines += _sampled(samples)
    lines += [
        Line(
            f"auto over off, {at_once} requests at once, total tokens/s, 5 ms",
            median_ratio(groups, at_once, AUTO.name),
            NEVER_BELOW,
        )
        for at_once in (4, 8)
    ]
    return tuple(lines)


def closeness(rows: Sequence[Row]) -> tuple[Closeness, ...]:
    """For each cold chat workload that was replayed as well."""
    cold = [row for row in rows if row.place.is_cold_chat and row.place.server != WITH_RATES]
    ceilings = {
        (row.place.delay_ms, row.place.workload): row.tokens_per_s
        for row in cold
        if row.place.setting == REPLAY.name
    }
    return tuple(
        Closeness(*key, row.place.server, row.tokens_per_s / ceilings[key])
        for row in cold
        if row.place.setting == AUTO.name and row.place.system == MESH and row.place.temperature == 0
        if (key := (row.place.delay_ms, row.place.workload)) in ceilings
    )


def _cold(server: str, setting: str, delay_ms: float, names: Collection[str]) -> Callable[[Place], bool]:
    return lambda place: (
        (place.server, place.setting, place.delay_ms) == (server, setting, delay_ms)
        and place.workload in names
        and place.temperature == 0
        and place.is_cold_chat
    )


def _over_rpc(samples: Sequence[Sample], delay_ms: float, categories: Collection[str]) -> float | None:
    pairs = [
        pair
        for pair in pairs_with_rpc(samples, AUTO.name)
        if pair.other.delay_ms == delay_ms and pair.other.workload in categories
    ]
    return _mean_of_workloads(pairs)


def _worst(
    rows: Sequence[Row], setting: str, delay_ms: float, names: Collection[str], target: float | None
) -> Line:
    found = {
        (row.place.workload, row.place.server): row
        for row in rows
        if row.speed_up is not None
        and row.place.setting == setting
        and row.place.delay_ms == delay_ms
        and row.place.workload in names
        and row.place.temperature == 0
    }
    title = f"{setting} over off, the worst of the categories and random-token, {delay_ms:g} ms"
    speed_ups = {place: row.speed_up for place, row in found.items() if row.speed_up is not None}
    if not speed_ups:
        return Line(title, None, target)
    workload, server = worst = min(speed_ups, key=lambda place: speed_ups[place])
    note = f"{workload}, {server}; mean of all {fmean(speed_ups.values()):.2f}"
    return Line(title, speed_ups[worst], target, note=note)


def _sampled(samples: Sequence[Sample]) -> list[Line]:
    """Drawn answers against greedy ones, both with and without the draft model, in exact mode."""
    pairs = [
        pair
        for pair in pairs_with_off(samples)
        if pair.other.server == EXACT and pair.other.setting == DRAFT.name
    ]
    drawn = [pair for pair in pairs if pair.other.temperature > 0]
    greedy = _mean_of_workloads([pair for pair in pairs if pair.other.temperature == 0])
    sampled = _mean_of_workloads(drawn)
    share = sampled / greedy if sampled is not None and greedy is not None else None
    same = fmean(not pair.is_fork for pair in drawn) if drawn else None
    return [
        Line("temperature 0.8, seeded, draft: answers with the text of off, exact, 20 ms", same, 1.0),
        Line("temperature 0.8, seeded, draft: share of the greedy speed-up, 20 ms", share, 0.7),
    ]


def _mean_of_workloads(pairs: Sequence[Pair]) -> float | None:
    by_workload: dict[str, list[float]] = {}
    for pair in pairs:
        by_workload.setdefault(pair.other.workload, []).append(pair.speed_up)
    return _mean_of([fmean(found) for found in by_workload.values()])


def _mean_of(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def recommend(rows: Sequence[Row]) -> Recommendation:
    """The setting with the highest mean speed-up of those that cost no workload more than 3 %.

    Only settings measured at every delay take part, so that none wins by having met only the easy ones.
    """
    candidates = sorted(_candidates(rows), key=lambda candidate: -candidate.score)
    if not candidates:
        return Recommendation(None, (), "No setting was measured on cold chat workloads.")
    harmless = [candidate for candidate in candidates if candidate.worst >= _FLOOR]
    if harmless and harmless[0].score > 1.0:
        best = harmless[0]
        faster = [candidate for candidate in candidates if candidate.score > best.score]
        reason = f"It is the fastest of {len(candidates)} on the mean"
        if faster:
            reason = (
                f"{len(faster)} of {len(candidates)} are faster on the mean, "
                f"but each of them makes some workload slower than {_FLOOR:g} times off"
            )
        reason += f"; its worst workload is {best.worst_at} at {best.worst:.2f}."
        return Recommendation(best, tuple(candidates), reason)
    best = candidates[0]
    return Recommendation(
        None,
        tuple(candidates),
        f"The fastest, {best.setting} on {best.server}, brings {best.score:.2f} on the mean and "
        f"{best.worst:.2f} on {best.worst_at}: leave speculation off, or serve those workloads without it.",
    )


def _candidates(rows: Sequence[Row]) -> list[Candidate]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        place = row.place
        if (
            place.system == MESH
            and place.is_cold_chat
            and place.temperature == 0
            and place.setting not in {OFF.name, OFF_AGAIN.name, REPLAY.name}
            and place.server != WITH_RATES
            and row.speed_up is not None
        ):
            found.setdefault((place.server, place.setting), []).append(row)
    delays = {row.place.delay_ms for members in found.values() for row in members}
    return [
        _candidate(server, setting, members)
        for (server, setting), members in found.items()
        if {row.place.delay_ms for row in members} == delays
    ]


def _candidate(server: str, setting: str, rows: Sequence[Row]) -> Candidate:
    by_delay: dict[float, list[float]] = {}
    for row in rows:
        by_delay.setdefault(row.place.delay_ms, []).append(row.speed_up or 0.0)
    worst = min(rows, key=lambda row: row.speed_up or 0.0)
    return Candidate(
        server=server,
        setting=setting,
        speed_ups={delay_ms: fmean(values) for delay_ms, values in sorted(by_delay.items())},
        worst=worst.speed_up or 0.0,
        worst_at=f"{worst.place.workload} at {worst.place.delay_ms:g} ms",
    )
