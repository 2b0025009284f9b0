"""What stage files may take of a host's disk: those that were not used for longest go first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from spanmesh_proto.errors import ModelError
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Collection

    from stages.weights.stage_store import StageStore

log = structlog.get_logger()


def make_room(
    store: StageStore, needed_bytes: int, limit_bytes: int | None, *, keep: Collection[str] = ()
) -> int:
    """Remove stages until what is left, and what is to come, keeps to the limit.

    Stages that are loaded, or on their way in, stay; where the limit is too small for them it is exceeded.

    Args:
        store: Whose.
        needed_bytes: What is to come.
        limit_bytes: None limits nothing.
        keep: Names of stages that are to stay.

    Returns:
        The bytes that were freed.

    Raises:
        ModelError: If what is to come is more than the limit by itself.
    """
    if limit_bytes is None:
        return 0
    if needed_bytes > limit_bytes:
        raise ModelError(
            f"a stage of {format_size(needed_bytes)} is larger than the whole cache may be, "
            f"{format_size(limit_bytes)}: raise --cache-size",
            param="--cache-size",
        )
    stages = sorted(store.stages(), key=lambda stage: stage.used_at_s)
    total_bytes = sum(stage.size_bytes for stage in stages)
    freed_bytes = 0
    for stage in stages:
        if total_bytes - freed_bytes + needed_bytes <= limit_bytes:
            break
        if stage.sha256 not in keep and store.remove(stage):
            freed_bytes += stage.size_bytes
            log.info("cached_stage_removed", sha256=stage.sha256[:12], size_bytes=stage.size_bytes)
    if total_bytes - freed_bytes + needed_bytes > limit_bytes:
        log.warning(
            "cache_over_limit", bytes=total_bytes - freed_bytes + needed_bytes, limit_bytes=limit_bytes
        )
    return freed_bytes
