"""What the links of a plan ask for, from what was measured of hosts and links. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.wire_choice import WireChoice, wire_choices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.cluster.links import Links
    from mesh.planner import Plan
    from mesh.stage_sizes import StageSizes

# Hidden states travel as float32 unless the user chooses otherwise.
HIDDEN_VALUE_BYTES: Final = 4

# A measurement of nothing must not divide by nothing.
_SLOWEST_GB_PER_S: Final = 0.01


def planned_wires(
    plan: Plan, sizes: StageSizes, speeds_gb_per_s: Mapping[str, float], links: Links
) -> tuple[WireChoice | None, ...]:
    """What each stage's link to the next asks for.

    A row takes a stage as long as its host needs to read the stage's weights, which is what a token takes
    alone; in a batch rows take less, so a link that looks just fast enough may still hold up a full pipeline.

    Args:
        plan: Which host holds what.
        sizes: Of the plan's model.
        speeds_gb_per_s: How fast hosts read weights.
        links: With their bandwidths.

    Returns:
        One for each stage; None for the tail, between stages of one host, and where nothing was measured.
    """
    compute_ms = [
        sizes.read_bytes(stage.layers) / max(speeds_gb_per_s.get(stage.host, 0.0), _SLOWEST_GB_PER_S) / 1e6
        for stage in plan.stages
    ]
    rates = {(link.source, link.target): link.bytes_per_s for link in links.links}
    return wire_choices(
        [stage.host for stage in plan.stages],
        compute_ms,
        sizes.model.hidden_width,
        lambda source, target: rates.get((source, target)),
    )
