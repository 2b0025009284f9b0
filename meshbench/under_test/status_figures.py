"""Figures of a mesh over a run: differences of its status at the beginning and the end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeVar

from mesh.cli.top import is_same_ring

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.status import MeshStatus, StageStatus

HEAD: Final = "head"

Count = TypeVar("Count", int, float)


@dataclass(frozen=True)
class RingLink:
    """A link of the ring, as decoding windows met it."""

    source: str
    """Host that sent; `head` is the coordinator."""
    target: str
    """Host that received."""
    wire_ms: float
    """Mean time from the sending of a window to its arrival, message handling included."""
    num_windows: int
    """Windows that this is the mean of."""


@dataclass(frozen=True)
class RingFigures:
    """Figures of a ring over a run."""

    stages: tuple[StageStatus, ...] = ()
    """With the counts and times of the run."""
    links: tuple[RingLink, ...] = ()
    """None without a decoding window."""
    groups_found: Mapping[int, int] = field(default_factory=dict)
    """Best number of groups at the end, by the number of sessions."""

    @classmethod
    def between(cls, before: MeshStatus, now: MeshStatus) -> RingFigures:
        """Figures between two statuses, the earlier one first."""
        groups_found = {} if now.sessions is None else now.sessions.groups_found
        return cls(stages_between(before, now), ring_links_between(before, now), groups_found)


def stages_between(before: MeshStatus, now: MeshStatus) -> tuple[StageStatus, ...]:
    """Stages with their counts and times between two statuses.

    A ring that was made anew in between counts from zero: then all its counts are of the time between.

    Args:
        before: The earlier one.
        now: The later one.
    """
    if not is_same_ring(before, now):
        return now.stages
    return tuple(_stage_between(old, new) for old, new in zip(before.stages, now.stages, strict=True))


def _stage_between(old: StageStatus, new: StageStatus) -> StageStatus:
    num_windows = new.windows - old.windows
    compute_ms, queue_ms = new.compute_ms - old.compute_ms, new.queue_ms - old.queue_ms
    return replace(
        new,
        windows=num_windows,
        compute_ms=compute_ms,
        queue_ms=queue_ms,
        mean_compute_ms=round(compute_ms / num_windows, 3) if num_windows else 0.0,
        mean_queue_ms=round(queue_ms / num_windows, 3) if num_windows else 0.0,
        dropped_windows=_grown(old.dropped_windows, new.dropped_windows),
        decodes=_grown(old.decodes, new.decodes),
        rows=_grown(old.rows, new.rows),
        decode_cpu_ms=_grown(old.decode_cpu_ms, new.decode_cpu_ms),
        sent_bytes=_grown(old.sent_bytes, new.sent_bytes),
    )


def _grown(old: Count | None, new: Count | None) -> Count | None:
    """Difference of a counter; None if the stage did not answer in time for either."""
    return None if old is None or new is None else new - old


def ring_links_between(before: MeshStatus, now: MeshStatus) -> tuple[RingLink, ...]:
    """Links of the ring between two statuses; none without a decoding window.

    Args:
        before: The earlier one.
        now: The later one.
    """
    later = now.round_trips
    if later is None or not now.stages:
        return ()
    earlier = before.round_trips if is_same_ring(before, now) else None
    num_windows = later.windows - (0 if earlier is None else earlier.windows)
    if num_windows < 1:
        return ()
    old_ms = (None if earlier is None else earlier.wire_ms) or [0.0] * len(later.wire_ms)
    names = [HEAD, *(stage.host for stage in now.stages), HEAD]
    return tuple(
        RingLink(source, target, (new - old) / num_windows, num_windows)
        for (source, target), old, new in zip(pairwise(names), old_ms, later.wire_ms, strict=True)
    )
