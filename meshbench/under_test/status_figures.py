"""Figures of `/mesh/status` over a run: differences of the counters at its beginning and its end."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from mesh.cli.top import is_same_ring

if TYPE_CHECKING:
    from collections.abc import Mapping

# Of a stage; all of them only grow.
_COUNTS: Final = (
    *("windows", "compute_ms", "queue_ms"),
    *("dropped_windows", "decodes", "rows", "decode_cpu_ms", "sent_bytes"),
)
HEAD: Final = "head"


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


def stages_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Stages as in `/mesh/status`, with their counts and times between two answers.

    A ring that was made anew in between counts from zero: then all its counts are of the time between.

    Args:
        before: The earlier answer.
        now: The later one.
    """
    stages: list[dict[str, Any]] = [dict(stage) for stage in now["stages"]]
    if not is_same_ring(before, now):
        return tuple(stages)
    return tuple(_stage_between(old, new) for old, new in zip(before["stages"], stages, strict=True))


def _stage_between(old: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    found = dict(new)
    for name in _COUNTS:
        # A stage that did not answer in time has no counters in that answer.
        if name in old and name in new:
            found[name] = new[name] - old[name]
        else:
            found.pop(name, None)
    num_windows = found["windows"]
    for name in ("compute", "queue"):
        found[f"mean_{name}_ms"] = round(found[f"{name}_ms"] / num_windows, 3) if num_windows else 0.0
    return found


def ring_links_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[RingLink, ...]:
    """Links of the ring between two answers of `/mesh/status`; none without a decoding window.

    Args:
        before: The earlier answer.
        now: The later one.
    """
    later = now.get("round_trips")
    if later is None or not now["stages"]:
        return ()
    earlier = (before.get("round_trips") if is_same_ring(before, now) else None) or {}
    num_windows = later["windows"] - earlier.get("windows", 0)
    if num_windows < 1:
        return ()
    old_ms = earlier.get("wire_ms") or [0.0] * len(later["wire_ms"])
    names = [HEAD, *(stage["host"] for stage in now["stages"]), HEAD]
    return tuple(
        RingLink(source, target, (new - old) / num_windows, num_windows)
        for (source, target), old, new in zip(pairwise(names), old_ms, later["wire_ms"], strict=True)
    )
