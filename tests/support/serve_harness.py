"""What `mesh serve` does while it serves, in one process: real stages, links and certificates, but no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from mesh.cluster.certificates import Authority, make_certificate
from mesh.cluster.host_facts import HostFacts, read_versions
from mesh.cluster.members import Member, Members
from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.coordinator.tail_draft_plug import TailDraftPlug
from mesh.draft.assistant_file import beside_tail
from mesh.draft.drafter import read_drafter
from mesh.options.host import HeadOptions
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.placement.planner import StagePlacement
from mesh.placement.replanner import NewStage, Replan, replan
from mesh.serve.allocations import HostAllocations
from mesh.serve.failures import Incidents
from mesh.serve.host_draining import HostDraining
from mesh.serve.pipeline import Pipeline, PipelineStage, log_stage_error, wire_up
from mesh.serve.reconfiguration import PlacementExecutor, RecoveryContext, RingCutover
from mesh.serve.replicas import ReplicaManager
from mesh.serve.stage_factory import StageMaker, Transfers
from mesh.serve.stage_handle import new_ring_credentials
from mesh.serve.supervisor import Supervisor
from spanmesh_proto.errors import StageFailed
from speculative.controller import ControllerOptions
from stages.gguf import part_paths
from stages.layers import LayerRange
from stages.slicing.model_facts import read_model_facts
from stages.transport.hidden_codec import HiddenType
from stages.weights.fetch import FetchSource
from stages.weights.hashing import stamps_of
from stages.weights.virtual_stages import StageCache
from tests.support.ring_harness import plugs_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from mesh.cluster.membership_server import MembershipService
    from mesh.coordinator.feature_store import FeatureNeeds
    from mesh.engine import GenerationRequest
    from mesh.placement.topology import Topology
    from mesh.serve.head import Head
    from mesh.serve.preflight import Preflight
    from mesh.tuning.recorder import Recorder
    from speculative.proposer import Proposer
    from stages.grammar.automaton import TokenTexts
    from stages.serving.actor import StageActor

WORKLOAD = Workload(ctx_size=256, num_slots=2, is_exact=True)
PARTS = (LayerRange(0, 10), LayerRange(10, 20), LayerRange(20, 30))


class _Method:
    def __init__(self, actor: InProcessActor, name: str) -> None:
        self._actor = actor
        self._name = name

    async def remote(self, *arguments: Any) -> Any:
        if self._actor.is_dead:
            raise StageFailed("its process ended")
        return await getattr(self._actor.stage, self._name)(*arguments)


class InProcessActor:
    """Called like one of Ray's, but here."""

    def __init__(self, stage: StageActor) -> None:
        self.stage = stage
        self.is_dead = False

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)


class InProcessDriver:
    """Places actors here, and ends them as abruptly as a process ends.

    Attributes:
        refuses: Names of Ray nodes where nothing starts.
        starts: Nothing starts anywhere while it is not set.
    """

    def __init__(self) -> None:
        self.refuses: set[str] = set()
        self.starts = asyncio.Event()
        self.starts.set()
        self.num_created = 0
        self._ending: set[asyncio.Task[None]] = set()

    async def create(self, kind: type, *arguments: Any, ray_node_name: str, **_: Any) -> InProcessActor:
        if ray_node_name in self.refuses:
            raise StageFailed(f"nothing starts on {ray_node_name}")
        await self.starts.wait()
        self.num_created += 1
        return InProcessActor(kind(*arguments, end_process=lambda: None))

    def kill(self, actor: InProcessActor) -> None:
        if not actor.is_dead:
            actor.is_dead = True
            task = asyncio.create_task(actor.stage.stop())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._ending)


@dataclass
class Said:
    """What hosts were told."""

    let_go: list[str] = field(default_factory=list)
    announced: list[str] = field(default_factory=list)


class Messages:
    """The head's membership service, as far as departures need it."""

    def __init__(self, members: Members) -> None:
        self.said = Said()
        self._members = members

    def dismiss(self, name: str, _state: str) -> None:
        self.said.let_go.append(name)
        self._members.remove(name)

    def announce(self, name: str, state: str) -> None:
        self.said.announced.append(f"{name}: {state}")

    def evict(self, name: str) -> None:
        self._members.remove(name)


@dataclass
class Serving:
    """What a test sees of it."""

    members: Members
    pipeline: Pipeline
    coordinator: Coordinator
    host_draining: HostDraining
    incidents: Incidents
    messages: Messages
    driver: InProcessDriver
    allocations: HostAllocations
    rings: list[tuple[Pipeline, Incidents]]

    def hosts(self) -> list[str]:
        """Of the stages, in order."""
        return [stage.placement.host for stage in self.pipeline.stages]

    def kill(self, index: int) -> None:
        """End a stage's process."""
        handle = self.pipeline.stages[index].handle
        assert handle is not None
        self.driver.kill(handle._actor)

    async def until(self, is_so: Callable[[], object], within_s: float = 30.0) -> None:
        async with asyncio.timeout(within_s):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def stage_bytes(sizes: StageSizes) -> int:
    """What the largest of the three stages takes."""
    return max(sizes.memory(layers).total_bytes for layers in PARTS)


def host(name: str, memory_bytes: int) -> Member:
    facts = HostFacts(memory_bytes, 1, 20.0, read_versions())
    return Member(name, "127.0.0.1", facts, f"{name}.1", is_ready=True)


async def written_at_once() -> None:
    """No next head is to know anything."""


@asynccontextmanager
async def serving(
    model: Path,
    hosts: dict[str, float],
    *,
    topology: Topology | None = None,
    make_proposers: Callable[[GenerationRequest], Sequence[Proposer]] | None = None,
    feature_needs: FeatureNeeds | None = None,
    recorder: Recorder | None = None,
    say: Callable[[str], None] = lambda _phase: None,
    beside: Serving | None = None,
    has_replicas: bool = True,
    token_texts: TokenTexts | None = None,
    workload: Workload = WORKLOAD,
    assistant: Path | None = None,
    controller: ControllerOptions | None = None,
) -> AsyncIterator[Serving]:
    """Three stages on the first three hosts, tended while in the block.

    Args:
        model: With 30 layers. Stage files go to the default cache.
        hosts: Name to memory, in multiples of what the largest stage takes.
        topology: Locks the placement that it starts with.
        make_proposers: Gives each request its proposers.
        feature_needs: Hidden states that they read, or that are recorded.
        recorder: Of answers.
        say: Told what goes on.
        beside: Another model on the same hosts; then of `hosts` only the names count.
        has_replicas: Whether spare hosts are given replicas of stages, after four seconds.
        token_texts: Of the vocabulary, for answers with a grammar.
        workload: Context and slots of each stage.
        assistant: File of an assistant that drafts beside the last stage.
        controller: Of speculation.
    """
    facts, cache, pipeline = read_model_facts(model), StageCache(), Pipeline()
    drafter = None if assistant is None else read_drafter(assistant, facts)
    if drafter is not None:
        facts = beside_tail(facts, drafter.header, workload.num_slots)
    members, driver = (Members(), InProcessDriver()) if beside is None else (beside.members, beside.driver)
    allocations = HostAllocations(lambda _member: False) if beside is None else beside.allocations
    rings: list[tuple[Pipeline, Incidents]] = [] if beside is None else beside.rings
    sizes = StageSizes(facts, workload)
    for name, share in hosts.items() if beside is None else ():
        members.admit(host(name, int(share * stage_bytes(sizes))))
    authority = Authority(make_certificate(dt.datetime.now(dt.UTC)))
    head = SimpleNamespace(
        driver=driver,
        authority=authority,
        source_for=lambda _member: FetchSource("127.0.0.1:1", b"", ""),
        # All are this host, so that all copy from the model itself.
        is_own=lambda _member: True,
        members=members,
    )
    options = HeadOptions(model=model, exact=True)
    known = SimpleNamespace(
        model=facts, workload=workload, stamps=stamps_of(part_paths(model)), drafter=drafter
    )
    maker = StageMaker(options, cast("Preflight", known), cast("Head", head), cache, Transfers())
    allocation = allocations.open(f"model {len(rings)}", pipeline)
    executor, incidents = PlacementExecutor(maker, allocation, members), Incidents(time.time)
    messages = Messages(members) if beside is None else beside.messages
    rings.append((pipeline, incidents))
    placements = [
        StagePlacement(name, layers, sizes.memory(layers)) for name, layers in zip(hosts, PARTS, strict=False)
    ]
    pipeline.stages = tuple(PipelineStage(placement, HiddenType.F32) for placement in placements)
    wires = (HiddenType.F32,) * len(placements)
    pipeline.stages = await executor.load_stages(
        Replan(tuple(NewStage(placement) for placement in placements), (), ""), wires, log_stage_error
    )
    pipeline.intended = ()
    credentials = new_ring_credentials(7)
    coordinator = Coordinator(
        await wire_up(pipeline.stages, credentials, log_stage_error),
        CoordinatorOptions(
            workload.ctx_size,
            workload.num_slots,
            63,
            facts.n_vocab,
            repair_wait_s=1.0,
            token_texts=None if token_texts is None else lambda: token_texts,
            controller=ControllerOptions() if controller is None else controller,
        ),
        plugs=[
            *plugs_for(feature_needs=feature_needs, recorder=recorder),
            *([] if drafter is None else [TailDraftPlug()]),
        ],
        mesh_id=credentials.mesh_id,
        mesh_key=credentials.mesh_key,
        make_proposers=make_proposers,
        clock_s=time.monotonic,
        identity=authority.own_identity(["coordinator"], "127.0.0.1"),
        term=7,
    )
    pipeline.credentials = credentials
    await coordinator.start()

    async def is_there(_member: Member, _timeout_s: float) -> bool:
        return True

    context = RecoveryContext(
        pipeline=pipeline,
        members=members,
        sizes=sizes,
        capacity_of=allocation.capacity_of,
        is_there=is_there,
        executor=executor,
        cutover=RingCutover(pipeline, coordinator, 7, lambda _stages, _reason: None),
        coordinator=coordinator,
        incidents=incidents,
        on_failure=lambda _failure, _loss, _member: None,
        announce=say,
        clock_s=time.monotonic,
        replan=replan if topology is None else topology.replan,
    )
    replica_manager = ReplicaManager(
        pipeline,
        maker,
        members,
        sizes,
        capacity_of=allocation.capacity_for_replicas,
        clock_s=time.monotonic,
        are_wanted=has_replicas and topology is None,
    )
    host_draining = (
        HostDraining(
            members,
            cast("MembershipService", messages),
            lambda: rings,
            on_new_token=lambda: None,
            clock_s=time.monotonic,
            until_written=written_at_once,
        )
        if beside is None
        else beside.host_draining
    )
    tending = asyncio.create_task(Supervisor(context, replica_manager, host_draining).run())
    try:
        yield Serving(
            members,
            pipeline,
            coordinator,
            host_draining,
            incidents,
            messages=messages,
            driver=driver,
            allocations=allocations,
            rings=rings,
        )
        assert not tending.done(), tending.exception()
    finally:
        tending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await tending
        await coordinator.stop()
        await context.cutover.close()
        await pipeline.stop()
        allocations.close(allocation)
        rings.remove((pipeline, incidents))
        if beside is None:
            await driver.close()
