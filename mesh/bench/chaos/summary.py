"""Harms of one kind, put together. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.bench.chaos.repair import Repair


@dataclass(frozen=True)
class KindSummary:
    """All harms of a kind. Times in seconds.

    Attributes:
        kind: See `harm.MEANING`.
        count: How many.
        num_warm: For how many the lost layers were loaded already.
        median_pause_s: Of all clients' pauses; None if there were no clients.
        worst_pause_s: The longest of them; None likewise.
        worst_silence_s: The longest time without even a comment ping.
        median_repair_s: What the head took, from its noticing on; None if it repaired nothing.
        median_whole_s: Until all hosts were back; None if they never were.
        worst_newcomer_s: The longest that a new request waited for an answer or a 503; None without any.
        num_not_whole: After how many the mesh was not whole in time.
    """

    kind: str
    count: int
    num_warm: int
    median_pause_s: float | None
    worst_pause_s: float | None
    worst_silence_s: float
    median_repair_s: float | None
    median_whole_s: float | None
    worst_newcomer_s: float | None
    num_not_whole: int


def by_kind(repairs: Sequence[Repair]) -> list[KindSummary]:
    """In the order in which the kinds first came."""
    found = []
    for kind in dict.fromkeys(repair.kind for repair in repairs):
        own = [repair for repair in repairs if repair.kind == kind]
        pauses = [pause_s for each in own for pause_s in each.pauses_s]
        repair_s = [each.repair_s for each in own if each.repair_s is not None]
        whole_s = [each.whole_s for each in own if each.whole_s is not None]
        found.append(
            KindSummary(
                kind=kind,
                count=len(own),
                num_warm=sum(each.is_warm is True for each in own),
                median_pause_s=median(pauses) if pauses else None,
                worst_pause_s=max(pauses, default=None),
                worst_silence_s=max(each.silence_s for each in own),
                median_repair_s=median(repair_s) if repair_s else None,
                median_whole_s=median(whole_s) if whole_s else None,
                worst_newcomer_s=max((each.newcomer.took_s for each in own if each.newcomer), default=None),
                num_not_whole=sum(each.whole_s is None for each in own),
            )
        )
    return found
