"""What a mesh did between two looks at its status. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class StagePace:
    """One stage.

    Attributes:
        compute_ms: Of a window, since the look before; since the start if there was none since then.
        queue_ms: Likewise, waiting for the stage.
        busy: Share of the time that it computed; None at the first look.
        windows_per_s: None at the first look.
    """

    compute_ms: float
    queue_ms: float
    busy: float | None
    windows_per_s: float | None


@dataclass(frozen=True)
class MeshPace:
    """All of it.

    Attributes:
        stages: In order.
        tokens_per_s: Committed, of all sessions; None at the first look.
        acceptance: Share of the proposed tokens; None if none were proposed.
        wire_ms: Of a window on its way, all links together.
        is_recent: Whether this is of the time between the looks, not of all time.
    """

    stages: tuple[StagePace, ...]
    tokens_per_s: float | None
    acceptance: float | None
    wire_ms: float
    is_recent: bool


def pace_between(before: Mapping[str, Any] | None, now: Mapping[str, Any], seconds: float) -> MeshPace:
    """Compare two answers of `/mesh/status`.

    A ring that was made anew in between, which counts from zero, is looked at as if for the first time.

    Args:
        before: The former one, if there is one.
        now: The latest.
        seconds: Between the two.
    """
    then = before if before is not None and _is_same_ring(before, now) else None
    former: Sequence[Mapping[str, Any] | None] = (
        then["stages"] if then is not None else [None] * len(now["stages"])
    )
    stages = tuple(_stage_pace(old, new, seconds) for old, new in zip(former, now["stages"], strict=True))
    speculation = now.get("speculation") or {}
    old_speculation = (then or {}).get("speculation") or {}
    windows = _grown(old_speculation, speculation, "windows")
    is_recent = then is not None and windows > 0
    if not is_recent:
        old_speculation = {}
    proposed = _grown(old_speculation, speculation, "proposed")
    accepted = _grown(old_speculation, speculation, "accepted")
    tokens = _tokens(speculation) - _tokens(old_speculation)
    return MeshPace(
        stages=stages,
        tokens_per_s=None if then is None else (tokens / seconds if is_recent and seconds > 0 else 0.0),
        acceptance=accepted / proposed if proposed else None,
        wire_ms=_mean(
            _wire_total_ms(old_speculation), _wire_total_ms(speculation), old_speculation, speculation
        ),
        is_recent=is_recent,
    )


def _is_same_ring(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    def ring(status: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        return [(stage["address"], stage["layers"]) for stage in status["stages"]]

    return ring(before) == ring(now) and all(
        old["windows"] <= new["windows"] for old, new in zip(before["stages"], now["stages"], strict=True)
    )


def _stage_pace(old: Mapping[str, Any] | None, new: Mapping[str, Any], seconds: float) -> StagePace:
    windows = new["windows"] - (0 if old is None else old["windows"])
    if old is None or windows == 0:
        idle = None if old is None else 0.0
        return StagePace(new["mean_compute_ms"], new["mean_queue_ms"], idle, idle)
    compute_ms = _total_ms(new, "mean_compute_ms") - _total_ms(old, "mean_compute_ms")
    queue_ms = _total_ms(new, "mean_queue_ms") - _total_ms(old, "mean_queue_ms")
    return StagePace(
        compute_ms=max(0.0, compute_ms / windows),
        queue_ms=max(0.0, queue_ms / windows),
        busy=max(0.0, min(1.0, compute_ms / (seconds * 1e3))),
        windows_per_s=windows / seconds,
    )


def _total_ms(stage: Mapping[str, Any], mean: str) -> float:
    return float(stage["windows"] * stage[mean])


def _grown(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> int:
    """Sessions that end may be forgotten: nothing grows backwards."""
    return max(0, int(new.get(name, 0)) - int(old.get(name, 0)))


def _tokens(speculation: Mapping[str, Any]) -> float:
    return float(speculation.get("windows", 0) * speculation.get("tokens_per_window", 0.0))


def _wire_total_ms(speculation: Mapping[str, Any]) -> float:
    return float(
        speculation.get("windows", 0) * (speculation.get("mean_window_ms") or {}).get("network", 0.0)
    )


def _mean(old_ms: float, new_ms: float, old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    windows = _grown(old, new, "windows")
    return max(0.0, (new_ms - old_ms) / windows) if windows else 0.0
