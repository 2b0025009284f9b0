"""Which setting to serve with. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING, Final

from mesh.bench.spec.sample import MESH
from mesh.bench.spec.setting import OFF, OFF_AGAIN, REPLAY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.bench.spec.rows import Row

# What a single workload may lose at most for the sake of the others.
_FLOOR: Final = 0.97


@dataclass(frozen=True)
class Candidate:
    """A setting on a server, judged by cold chat workloads.

    Attributes:
        server: How the server was started.
        setting: Name of the setting.
        speed_ups: By delay, the mean over workloads.
        worst: The smallest mean of a workload at any delay.
        worst_at: Which that is.
    """

    server: str
    setting: str
    speed_ups: dict[float, float]
    worst: float
    worst_at: str

    @property
    def score(self) -> float:
        """Geometric mean over delays: a setting for all of them."""
        return geometric_mean(self.speed_ups.values())


@dataclass(frozen=True)
class Recommendation:
    """The choice and its grounds.

    Attributes:
        chosen: None if it is best to leave speculation off, or if nothing was measured.
        candidates: All, best first.
        reason: One sentence.
    """

    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    reason: str


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
        is_cold_chat = not (place.is_raw or place.is_warm) and place.temperature == 0
        if (
            place.system == MESH
            and is_cold_chat
            and place.setting not in {OFF.name, OFF_AGAIN.name, REPLAY.name}
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
