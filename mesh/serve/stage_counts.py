"""What the stages themselves count, asked for when somebody wants to see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh.coordinator.coordinator import PendingEngine
    from spanmesh_proto import windows_pb2 as wire


async def stage_counts(engine: PendingEngine) -> list[dict[str, Any]]:
    """Of every stage, in order, fit for JSON; none unless the ring is up and every stage answers."""
    coordinator = engine.coordinator
    if coordinator is None or not coordinator.is_ready:
        return []
    try:
        return [_as_dict(stats) for stats in await coordinator.stage_stats()]
    except TimeoutError:
        return []


def _as_dict(stats: wire.StageStats) -> dict[str, Any]:
    return {
        "open_sessions": stats.num_open_sessions,
        "queued_windows": stats.num_queued_windows,
        "dropped_windows": stats.num_dropped_windows,
        "decodes": stats.num_decodes,
        "rows": stats.num_rows,
        "sent_bytes": stats.num_sent_bytes,
        "resident_bytes": stats.resident_bytes,
    }
