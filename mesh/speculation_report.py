"""What speculation did for one answer, or for all so far: counts, times and reasons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speculative.acceptance import SpeculationStatistics

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class SpeculationReport:
    """Counts and times over judged windows; prefill chunks are left out.

    Attributes:
        by_proposer: Windows judged, by who proposed what they carried; plain windows under the empty name.
        num_voided_windows: Windows void before their verdict, because one ahead of them was rejected.
        num_voided_rows: Rows that they carried.
        num_wasted_rows: Those of them that all stages computed all the same.
        num_cancels: Times that the stages were told of void windows.
        round_trip_ms: From sending a window to its verdict, summed over windows; they overlap.
        queue_ms: The part of it that windows waited at stages.
        compute_ms: The part of it that stages computed: drawing and verifying included.
        draft_ms_per_token: What a token costs the draft model; None without one.
        controller: What the controller does, and why.
    """

    by_proposer: Mapping[str, SpeculationStatistics] = field(default_factory=dict)
    num_voided_windows: int = 0
    num_voided_rows: int = 0
    num_wasted_rows: int = 0
    num_cancels: int = 0
    round_trip_ms: float = 0.0
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    draft_ms_per_token: float | None = None
    controller: Mapping[str, Any] = field(default_factory=dict)

    @property
    def network_ms(self) -> float:
        """The part of the round trips that no stage accounts for."""
        return max(0.0, self.round_trip_ms - self.queue_ms - self.compute_ms)

    @property
    def total(self) -> SpeculationStatistics:
        """Over all proposers, plain windows too."""
        total = SpeculationStatistics()
        for statistics in self.by_proposer.values():
            total = total.merge(statistics)
        return total

    def merge(self, other: SpeculationReport) -> SpeculationReport:
        """The counts and times of both; what the controller says is the other's."""
        names = [*self.by_proposer, *(name for name in other.by_proposer if name not in self.by_proposer)]
        nothing = SpeculationStatistics()
        return SpeculationReport(
            by_proposer={
                name: self.by_proposer.get(name, nothing).merge(other.by_proposer.get(name, nothing))
                for name in names
            },
            num_voided_windows=self.num_voided_windows + other.num_voided_windows,
            num_voided_rows=self.num_voided_rows + other.num_voided_rows,
            num_wasted_rows=self.num_wasted_rows + other.num_wasted_rows,
            num_cancels=self.num_cancels + other.num_cancels,
            round_trip_ms=self.round_trip_ms + other.round_trip_ms,
            queue_ms=self.queue_ms + other.queue_ms,
            compute_ms=self.compute_ms + other.compute_ms,
            draft_ms_per_token=other.draft_ms_per_token or self.draft_ms_per_token,
            controller=other.controller or self.controller,
        )

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON: `timings.speculation` of an answer, `speculation` of `/mesh/status`."""
        total = self.total
        return {
            **self.controller,
            "windows": total.num_windows,
            "proposed": total.num_proposed,
            "accepted": total.num_accepted,
            "tokens_per_window": round(total.mean_committed, 3),
            "acceptance_per_position": _rounded(total.acceptance_per_position()),
            "proposers": {
                name: _proposer_as_dict(statistics) for name, statistics in self.by_proposer.items() if name
            },
            "stale_windows": self.num_voided_windows,
            "stale_rows": self.num_voided_rows,
            "stale_rows_computed": self.num_wasted_rows,
            "cancels": self.num_cancels,
            "mean_window_ms": self._mean_window_ms(total.num_windows),
            "draft_ms_per_token": _rounded_or_none(self.draft_ms_per_token),
        }

    def _mean_window_ms(self, num_windows: int) -> dict[str, float]:
        times = {
            "round_trip": self.round_trip_ms,
            "verify": self.compute_ms,
            "queue": self.queue_ms,
            "network": self.network_ms,
        }
        return {name: round(total / max(num_windows, 1), 3) for name, total in times.items()}


def _proposer_as_dict(statistics: SpeculationStatistics) -> dict[str, Any]:
    return {
        "drafts": statistics.num_drafts,
        "drafted": statistics.num_proposed,
        "accepted": statistics.num_accepted,
        "mean_accepted": round(statistics.mean_accepted, 3),
        "drafted_per_position": list(statistics.proposed_per_position),
        "accepted_per_position": list(statistics.accepted_per_position),
        "spans": {
            kind.span + ("_with_stop" if kind.has_stop else ""): count
            for kind, count in statistics.spans.items()
        },
    }


def _rounded(shares: tuple[float, ...]) -> list[float]:
    return [round(share, 3) for share in shares]


def _rounded_or_none(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
