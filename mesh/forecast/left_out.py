"""Why a host would hold nothing. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from stages.layers import LayerRange
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mesh.forecast.surroundings import KnownHost
    from mesh.placement.planner import Plan
    from mesh.placement.stage_sizes import StageSizes


def left_out(sizes: StageSizes, plan: Plan, hosts: Iterable[KnownHost]) -> dict[str, str]:
    """By name of each host that the plan gives nothing to: why."""
    chosen = {stage.host for stage in plan.stages}
    least_bytes = min(
        sizes.memory(LayerRange(start, stop)).total_bytes for start, stop in pairwise(sizes.edges)
    )
    return {
        host.capacity.name: host.absent or _reason(host, plan, least_bytes)
        for host in hosts
        if host.capacity.name not in chosen
    }


def _reason(host: KnownHost, plan: Plan, least_bytes: int) -> str:
    memory_bytes = host.capacity.memory_bytes
    if memory_bytes < least_bytes:
        return (
            f"too small: it gives {format_size(memory_bytes)}, the smallest share takes "
            f"{format_size(least_bytes)}"
        )
    count = len({stage.host for stage in plan.stages})
    enough = "one host is enough" if count == 1 else f"{count} hosts are enough"
    return f"not needed: {enough}, and a hop more costs time; it would be a spare"
