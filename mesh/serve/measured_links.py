"""The links of a running mesh, measured when somebody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from mesh.placement.links import LinkWish
from mesh.placement.stage_order import round_times
from mesh.placement.stage_sizes import StageSizes, Workload
from mesh.placement.wire_types import HIDDEN_VALUE_BYTES, planned_wires
from mesh.serve.planning import made_in_thread
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from mesh.placement.links import Links
    from mesh.placement.wire_types import WireChoice
    from mesh.serve.state import MeshState

log = structlog.get_logger()


async def measured_links(state: MeshState, num_probes: int, bulk_bytes: int) -> dict[str, Any]:
    """Measure, and say what it means for the stages' order; fit for JSON.

    Args:
        state: Of the mesh.
        num_probes: Round trips of each size on each link.
        bulk_bytes: Sent over each link to find its bandwidth; 0 leaves that out.

    Raises:
        ClusterError: If the mesh is not up yet.
    """
    if state.survey is None:
        raise ClusterError("the mesh is still starting: try again in a moment", retry_after_s=2)
    hidden_bytes = state.model.hidden_width * HIDDEN_VALUE_BYTES
    links = await state.survey.measure(LinkWish(hidden_bytes, num_probes, bulk_bytes))
    stages = () if state.plan is None else state.plan.stages
    head, hosts = state.survey.head, [stage.host for stage in stages]
    found = await made_in_thread(lambda _: round_times(hosts, head, links))
    wires = _wires(state, links) if bulk_bytes else ()
    for wire in wires:
        if wire.is_bottleneck:
            log.info("wire_proposed", option=f"--wire {wire.proposed}", **wire.as_dict())
    return {
        "head": head,
        "hidden_bytes": hidden_bytes,
        "bulk_bytes": bulk_bytes,
        "links": [link.as_dict() for link in links.links],
        "round": None if found is None else found.as_dict(),
        "wires": [wire.as_dict() for wire in wires],
    }


def _wires(state: MeshState, links: Links) -> tuple[WireChoice, ...]:
    """What those links ask for that hidden states cross."""
    if state.plan is None:
        return ()
    # How long a row takes does not depend on the caches.
    sizes = StageSizes(state.model, Workload(ctx_size=1, num_slots=1))
    speeds = {member.name: member.facts.speed_gb_per_s for member in state.members or ()}
    choices = planned_wires(state.plan, sizes, speeds, links)
    return tuple(choice for choice in choices if choice is not None)
