"""The acceptance table of `mesh bench chaos`. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

from mesh.bench.stress.checks import Line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.bench.chaos.repair import Repair
    from mesh.bench.chaos.tally import Tally

MEDIAN_PAUSE_S: Final = 5.0
WORST_PAUSE_S: Final = 15.0
WARM_PAUSE_S: Final = 2.5
NEWCOMER_S: Final = 3.0
SERVING_S: Final = 10.0


def stream_lines(found: Tally, when: str, *, is_exact: bool) -> list[Line]:
    """Nobody's answer breaks off, nobody's text changes."""
    refused = f"; {found.num_refused} requests were told to come again" if found.num_refused else ""
    early, late = found.num_hung_up_early, found.num_hung_up_late
    hung_up = (
        f"; {early + late} clients hung up, {early} of them before the first token" if early + late else ""
    )
    failed = Line(
        f"{when}: failed streams",
        found.num_failed,
        0,
        is_ceiling=True,
        note=f"of {found.num_streams}{hung_up}{refused}",
    )
    if not is_exact:
        return [failed]
    num_whole = found.num_streams - found.num_failed - early - late
    parts = f" and {late} beginnings" if late else ""
    unlike = Line(
        f"{when}: texts unlike the undisturbed run",
        found.num_unlike,
        0,
        is_ceiling=True,
        note=f"of {num_whole}{parts}, text and token ids",
    )
    return [failed, unlike]


def repair_lines(repairs: Sequence[Repair]) -> list[Line]:
    """What clients see of harms."""
    pauses = [pause_s for repair in repairs for pause_s in repair.pauses_s]
    worst = [repair.worst_pause_s for repair in repairs if repair.pauses_s]
    warm = [pause_s for repair in repairs if repair.is_warm for pause_s in repair.pauses_s]
    worst_warm = [repair.worst_pause_s for repair in repairs if repair.is_warm and repair.pauses_s]
    newcomers = [repair.newcomer for repair in repairs if repair.newcomer is not None]
    answered = sum(newcomer.outcome == "answer" for newcomer in newcomers)
    unsound = [newcomer for newcomer in newcomers if not newcomer.is_sound]
    of_each = "of the client who waits longest after each harm, median"
    return [
        _ceiling(
            "pause seen by a client, median, s",
            _median(pauses),
            MEDIAN_PAUSE_S,
            f"{len(pauses)} pauses; {of_each}: {_shown(worst)}",
        ),
        _ceiling("pause, worst, s", max(pauses, default=None), WORST_PAUSE_S),
        _ceiling(
            "pause where a spare had the layers loaded, median, s",
            _median(warm),
            WARM_PAUSE_S,
            f"{len(warm)} pauses after {len(worst_warm)} harms; {of_each}: {_shown(worst_warm)}",
        ),
        _ceiling(
            "a new request's answer or 503, worst, s",
            max((newcomer.took_s for newcomer in newcomers), default=None),
            NEWCOMER_S,
            f"{answered} of {len(newcomers)} got an answer; "
            f"median {_shown([newcomer.took_s for newcomer in newcomers])}",
        ),
        _ceiling(
            "new requests with neither",
            len(unsound) if newcomers else None,
            0,
            "; ".join(dict.fromkeys(newcomer.outcome for newcomer in unsound)),
        ),
    ]


def _ceiling(title: str, measured: float | None, most: float, note: str = "") -> Line:
    return Line(f"harms: {title}", measured, most, is_ceiling=True, note=note)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _shown(values: Sequence[float]) -> str:
    return f"{median(values):.2f}" if values else "none"
