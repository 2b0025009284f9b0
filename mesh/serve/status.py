"""State of a served model and of its head: `/mesh/status`, counters of stages, measured links."""

from __future__ import annotations

import time
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from mesh.api.head_services import LinkRuns
from mesh.placement.gpu_layers import format_gpu_layers
from mesh.placement.link_choices import HIDDEN_VALUE_BYTES, planned_wires, round_times
from mesh.placement.links import LinkProbeOptions
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.placement.planner import Plan
from mesh.serve.failures import Incidents
from mesh.serve.options import speculation_refusal
from mesh.serve.planning import plan_in_thread
from mesh.serve.stage_factory import Transfers
from mesh.status import (
    GpuStatus,
    HostStatus,
    LoadingStatus,
    MeshStatus,
    ModelDescription,
    StageCounts,
    WeightsStatus,
    copied,
)
from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto.errors import ClusterError
from stages.runtime.llama_libraries import attention_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.api.head_services import DrafterAdmin, ModelAdmin, OnDemandModels
    from mesh.cluster.link_probe import LinkSurvey
    from mesh.cluster.members import Member, Members
    from mesh.coordinator.coordinator import PendingEngine
    from mesh.engine import SpeculationMode
    from mesh.placement.context_choice import ContextChoice
    from mesh.placement.link_choices import WireChoice
    from mesh.placement.links import Links
    from mesh.placement.planner import StagePlacement
    from mesh.serve.allocations import HostAllocations
    from mesh.serve.head_state import HeadStateWriter
    from mesh.serve.host_draining import HostDraining
    from mesh.serve.host_inspection import Inspection
    from mesh.serve.pipeline import Pipeline
    from mesh.serve.stage_handle import StageHandle
    from spanmesh_proto import windows_pb2 as wire
    from stages.slicing.model_facts import ModelFacts

log = structlog.get_logger()


@dataclass(frozen=True)
class HeadParts:
    """Parts of an open head that the API reads."""

    members: Members
    """Hosts of the mesh."""
    survey: LinkSurvey
    """Measures the links between hosts."""
    allocations: HostAllocations
    """Memory and threads that all models hold of the hosts."""
    inspection: Inspection
    """Measures hosts and stages on request."""
    host_draining: HostDraining
    """Hosts that are to leave."""
    models: ModelAdmin
    """Models served beside the first."""
    state_writer: HeadStateWriter
    """Head state on disk, for the next head."""
    on_demand: OnDemandModels | None = None
    """Models that requests load; None without a library."""
    drafter_admin: DrafterAdmin | None = None
    """What tunes the first model's drafter; None if nothing does."""


@dataclass
class MeshState:
    """State of one served model and, for the first one, of the head: body of `/mesh/status`."""

    model: ModelFacts
    """Facts of the model's GGUF file."""
    engine: PendingEngine
    """Engine of the API; answers once the ring is connected."""
    pipeline: Pipeline
    """Stages and replicas of the model."""
    _: KW_ONLY
    numeric_mode: str
    """`fast` or `exact`."""
    speculation_mode: SpeculationMode
    """Proposers that are allowed."""
    num_checkpoints: int = 0
    """Checkpoints of each session, in models with recurrent layers."""
    describe_pictures: Callable[[ModelDescription], ModelDescription] | None = None
    """Adds its projector to its description; None for text only."""
    transfers: Transfers = field(default_factory=Transfers)
    """Weights sent to hosts."""
    incidents: Incidents = field(default_factory=lambda: Incidents(time.time))
    """Recent failures."""
    phase: str = "starting"
    """Current step, in a few words."""
    plan: Plan | None = None
    """Stage placement, once it is known."""
    context: ContextChoice | None = None
    """Choice of the context, once it is made; None if the operator named one, or a former head's ring keeps
    its own."""
    head: HeadParts | None = None
    """Parts of the head, once it is open; None for all models but the first."""

    @property
    def is_serving(self) -> bool:
        """Whether the ring was connected; stays true while a lost stage is replaced."""
        return self.engine.coordinator is not None

    @property
    def plan_reason(self) -> str | None:
        """Reason of the placement; None before there is one."""
        return None if self.plan is None else self.plan.reason

    def note_plan(self, stages: Sequence[StagePlacement], reason: str) -> None:
        """Record the placement of stages."""
        self.plan = Plan(tuple(stages), reason)

    def status(self) -> MeshStatus:
        """What `/mesh/status` says of the model and, for the first one, of the hosts."""
        coordinator, model, head = self.engine.coordinator, self.model, self.head
        status = MeshStatus() if coordinator is None else coordinator.status()
        if (speculation := status.speculation) is not None:
            speculation.mode = self.speculation_mode
            if speculation.policy is None:
                speculation.reason = speculation_refusal(
                    model, self.num_checkpoints, is_exact=self.numeric_mode == "exact"
                )
        described = ModelDescription(
            name=model.name,
            architecture=model.architecture,
            layers=model.n_layers,
            file_bytes=model.file_bytes,
            context=self.engine.context_length,
            numeric_mode=self.numeric_mode,
        )
        return replace(
            status,
            version=SOFTWARE_VERSION,
            protocol_version=PROTOCOL_VERSION,
            model=described if self.describe_pictures is None else self.describe_pictures(described),
            phase=self.phase,
            ready=self.engine.is_ready,
            plan=self.plan_reason,
            loading=tuple(map(_loading_status, self.pipeline.loading)),
            hosts=() if head is None else tuple(self._host_status(head, member) for member in head.members),
            state_not_written=None if head is None else head.state_writer.failure,
            failures=self.incidents.failures,
            repairs=self.incidents.repairs,
        )

    def _host_status(self, head: HeadParts, member: Member) -> HostStatus:
        facts = member.facts
        return copied(
            HostStatus,
            member,
            facts,
            facts.versions,
            ready=member.is_ready,
            leaving=member.is_leaving,
            copies=tuple(head.allocations.replicas_on(member.name)),
            weights=copied(WeightsStatus, self.transfers.of(member.name)),
            held_bytes=head.allocations.held_bytes(member),
            threads=facts.num_threads,
            speed_gb_per_s=round(facts.speed_gb_per_s, 1),
            gpus=tuple(
                copied(GpuStatus, gpu, speed_gb_per_s=round(gpu.speed_gb_per_s, 1)) for gpu in facts.gpus
            ),
            gpu_layers=format_gpu_layers(facts.gpu_layers),
            cpu_moe_layers=format_gpu_layers(facts.cpu_moe_layers),
            attention=attention_name(facts.attention_version),
            port_range=None if member.port_range is None else str(member.port_range),
        )


def _loading_status(handle: StageHandle) -> LoadingStatus:
    progress, layers = handle.progress, handle.config.layers
    return LoadingStatus(
        host=handle.member.name,
        layers=(layers.start, layers.stop),
        bytes=handle.config.memory.total_bytes,
        step="starting" if progress is None else progress.phase,
        share=0.0 if progress is None else round(progress.share, 3),
        fetched_bytes=0 if progress is None else progress.done_bytes,
        fetch_bytes=0 if progress is None else progress.total_bytes,
    )


async def stage_counts(engine: PendingEngine) -> list[StageCounts]:
    """Counters of every stage, in order; empty unless every stage answers."""
    coordinator = engine.coordinator
    if coordinator is None or not coordinator.is_ready:
        return []
    try:
        return [_counts(stats) for stats in await coordinator.stage_stats()]
    except TimeoutError:
        return []


def _counts(stats: wire.StageStats) -> StageCounts:
    return StageCounts(
        open_sessions=stats.num_open_sessions,
        queued_windows=stats.num_queued_windows,
        dropped_windows=stats.num_dropped_windows,
        decodes=stats.num_decodes,
        rows=stats.num_rows,
        decode_cpu_ms=stats.decode_cpu_us / 1000,
        sent_bytes=stats.num_sent_bytes,
        resident_bytes=stats.resident_bytes,
    )


def link_runs_of(state: MeshState) -> LinkRuns:
    """Measurements of the links of a mesh, one at a time."""
    return LinkRuns(partial(measured_links, state))


async def measured_links(
    state: MeshState, num_probes: int, bulk_bytes: int, *, checks_ports: bool = False
) -> dict[str, Any]:
    """Measure the links, and the effect of the stages' order; JSON-serialisable.

    Args:
        state: State of the first model.
        num_probes: Round trips of each size on each link.
        bulk_bytes: Sent over each link to find its bandwidth; 0 leaves that out.
        checks_ports: Whether hosts also try ports of each other's ranges.

    Raises:
        ClusterError: If the head is not open yet.
    """
    if state.head is None:
        raise ClusterError("the mesh is still starting: try again in some seconds", retry_after_s=2)
    hidden_bytes = state.model.hidden_width * HIDDEN_VALUE_BYTES
    options = LinkProbeOptions(hidden_bytes, num_probes, bulk_bytes, checks_ports)
    links = await state.head.survey.measure(options)
    stages = () if state.plan is None else state.plan.stages
    head, hosts = state.head.survey.head, [stage.host for stage in stages]
    found = await plan_in_thread(lambda _: round_times(hosts, head, links))
    wires = _wires(state, state.head.members, links) if bulk_bytes else ()
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


def _wires(state: MeshState, members: Members, links: Links) -> tuple[WireChoice, ...]:
    """Wire types proposed for the links between stages."""
    if state.plan is None:
        return ()
    # The time of a row does not depend on the caches.
    sizes = StageSizes(state.model, Workload(ctx_size=1, num_slots=1))
    speeds = {member.name: member.facts.speed_gb_per_s for member in members}
    choices = planned_wires(state.plan, sizes, speeds, links)
    return tuple(choice for choice in choices if choice is not None)
