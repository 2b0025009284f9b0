"""The acceptance table of `mesh bench chaos`. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

from mesh.bench.stress.line import Line

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
    failed = Line(
        f"{when}: failed streams",
        found.num_failed,
        0,
        is_ceiling=True,
        note=f"of {found.num_streams}{refused}",
    )
    if not is_exact:
        return [failed]
    num_compared = found.num_streams - found.num_failed
    unlike = Line(
        f"{when}: texts unlike the undisturbed run",
        found.num_unlike,
        0,
        is_ceiling=True,
        note=f"of {num_compared}, text and token ids",
    )
    return [failed, unlike]


def repair_lines(repairs: Sequence[Repair]) -> list[Line]:
    """What clients see of harms."""
    pauses = [repair.pause_s for repair in repairs]
    warm = [repair.pause_s for repair in repairs if repair.is_warm]
    newcomers = [repair.newcomer for repair in repairs if repair.newcomer is not None]
    answered = sum(newcomer.outcome == "answer" for newcomer in newcomers)
    unsound = [newcomer for newcomer in newcomers if not newcomer.is_sound]
    return [
        Line(
            "harms: pause seen by a client, median, s",
            median(pauses) if pauses else None,
            MEDIAN_PAUSE_S,
            is_ceiling=True,
            note=f"{len(pauses)} harms",
        ),
        Line("harms: pause, worst, s", max(pauses, default=None), WORST_PAUSE_S, is_ceiling=True),
        Line(
            "harms: pause where a spare had the layers loaded, median, s",
            median(warm) if warm else None,
            WARM_PAUSE_S,
            is_ceiling=True,
            note=f"{len(warm)} harms",
        ),
        Line(
            "harms: a new request's answer or 503, worst, s",
            max((newcomer.took_s for newcomer in newcomers), default=None),
            NEWCOMER_S,
            is_ceiling=True,
            note=f"{answered} of {len(newcomers)} got an answer",
        ),
        Line(
            "harms: new requests with neither",
            len(unsound) if newcomers else None,
            0,
            is_ceiling=True,
            note="; ".join(dict.fromkeys(newcomer.outcome for newcomer in unsound)),
        ),
    ]
