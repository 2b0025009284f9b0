"""Head failover: state for the next head, takeover of its stages, end of all others.

A state is written now and then, so it may name what has ended since. What it names is taken over only if it
is a whole ring whose stages run, and each says that it has loaded its layers. Otherwise the model is loaded
anew.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from mesh.placement.gpu_layers import memory_on
from mesh.placement.memory_estimate import StageSizes
from mesh.placement.planner import StagePlacement
from mesh.serve.head_state import HeadState, SavedModel, SavedStage
from mesh.serve.pipeline import PipelineStage
from spanmesh_proto.addresses import split_address
from spanmesh_proto.errors import MeshError, StageFailed
from stages.layers import LayerRange
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.cluster.members import Member
    from mesh.cluster.ray_driver import RayDriver
    from mesh.options.model import LoadRequest
    from mesh.placement.host_capacity import HostCapacity
    from mesh.serve.head import Head
    from mesh.serve.head_state import SavedRing
    from mesh.serve.pipeline import Pipeline
    from mesh.serve.preflight import Preflight
    from mesh.serve.served_model import ServedModel
    from mesh.serve.stage_factory import StageMaker
    from mesh.serve.stage_handle import StageHandle

# Hosts look for the head every second or so.
_WAIT_FOR_HOSTS_S: Final = 8.0
_WAIT_FOR_SPARES_S: Final = 2.0
_ANSWER_S: Final = 2.0
_WIRES: Final = frozenset(map(str, HiddenType))

log = structlog.get_logger()


class Takeover:
    """Takeover of the stages that a former head left running.

    Args:
        known: Results of the checks before the start.
        head: The open head, with the former head's Ray node.
        maker: Makes stages.
        pipeline: Empty pipeline, to be filled.
        setup: Fingerprint of the settings that stages would be loaded with now.
        capacity_of: Returns the capacity of a host for stages.
    """

    def __init__(
        self,
        known: Preflight,
        head: Head,
        maker: StageMaker,
        pipeline: Pipeline,
        setup: str,
        *,
        capacity_of: Callable[[Member], HostCapacity],
    ) -> None:
        self._num_layers = known.model.n_layers
        self._sizes = StageSizes(known.model, known.workload)
        self._head = head
        self._maker = maker
        self._pipeline = pipeline
        self._setup = setup
        self._capacity_of = capacity_of

    async def run(self, former: SavedRing) -> bool:
        """Take over the ring if it is whole; however this ends otherwise, none of its processes is left.

        Args:
            former: Ring of the model, as the former head recorded it.

        Returns:
            Whether the ring was taken over.

        Raises:
            MeshError: If the model cannot be cut.
        """
        is_taken_over = False
        try:
            fault = self._fault(former)
            if fault is None:
                is_taken_over = await self._fill(former)
            elif former.stages or former.copies:
                log.info("begins_anew", reason=fault)
            if not is_taken_over:
                # The stages that remain help the next plan no more than any host's stage files do.
                await self._pipeline.stop()
        finally:
            if not is_taken_over:
                end_ring(self._head.driver, former)
        return is_taken_over

    def _fault(self, former: SavedRing) -> str | None:
        if former.setup != self._setup:
            return "the model or the options have changed"
        return ring_fault(former.stages, self._num_layers)

    async def _fill(self, former: SavedRing) -> bool:
        """Fill the pipeline with what runs; returns whether that is the whole ring."""
        copies = [stage for stage in former.copies if self._is_copy(stage)]
        # Until it is known whether they run, their memory counts as used.
        self._pipeline.intended = tuple(map(self._expected, former.stages))
        await self._wait_for(former.stages, _WAIT_FOR_HOSTS_S)
        # A replica is worth a short wait only: the mesh can serve without.
        await self._wait_for(copies, _WAIT_FOR_SPARES_S)
        ring, replicas = await self._adopt(former.stages), await self._adopt(copies)
        if len(ring) < len(former.stages):
            # For their end.
            self._pipeline.replicas = [*ring, *replicas]
            return False
        self._pipeline.replicas = replicas
        self._pipeline.stages = tuple(
            PipelineStage(
                StagePlacement(handle.member.name, handle.config.layers, handle.config.memory),
                handle.config.hidden_type,
                handle,
            )
            for handle in ring
        )
        self._pipeline.intended = ()
        log.info("stages_taken_over", stages=len(ring), copies=len(replicas))
        return True

    def _is_copy(self, stage: SavedStage) -> bool:
        is_in_model = 0 <= stage.start < stage.stop <= self._num_layers
        return is_in_model and stage.wire in _WIRES

    async def _wait_for(self, stages: Sequence[SavedStage], most_s: float) -> None:
        """Wait for hosts to reconnect."""
        nodes = {stage.ray_node for stage in stages}
        members = self._head.members
        try:
            async with asyncio.timeout(most_s):
                while not nodes <= {member.ray_node_name for member in members.ready}:
                    await members.changed()
        except TimeoutError:
            log.warning("hosts_missing", hosts=sorted(nodes - {each.ray_node_name for each in members.ready}))

    async def _adopt(self, stages: Sequence[SavedStage]) -> list[StageHandle]:
        """Those stages that run and hold what they should, in the same order."""
        hosts: dict[SavedStage, Member] = {}
        for stage in stages:
            try:
                hosts[stage] = returned_host(self._head, stage)
            except StageFailed as error:
                _log_refusal(stage, error)
        await self._maker.describe(
            (host.name, LayerRange(stage.start, stage.stop)) for stage, host in hosts.items()
        )
        found = await asyncio.gather(*(self._adopt_one(*returned) for returned in hosts.items()))
        return [handle for handle in found if handle is not None]

    async def _adopt_one(self, stage: SavedStage, member: Member) -> StageHandle | None:
        placement = replace(self._expected(stage), host=member.name)
        try:
            handle = self._maker.make(
                placement, member, wire=HiddenType(stage.wire), num_threads=stage.num_threads
            )
            return await adopted(handle, stage)
        except MeshError as error:
            _log_refusal(stage, error)
            return None

    def _expected(self, stage: SavedStage) -> StagePlacement:
        """Placement of a stage as it would be loaded now; it tells itself what it has loaded."""
        layers = LayerRange(stage.start, stage.stop)
        member = self._head.members.find(stage.host)
        host = None if member is None else self._capacity_of(member)
        memory = None if host is None else memory_on(self._sizes, layers, host)
        return StagePlacement(stage.host, layers, memory or self._sizes.memory(layers))


class RestorableModel(Protocol):
    """A model of any kind that a next head is to load again."""

    @property
    def load_request(self) -> LoadRequest | None:
        """Request that it was loaded by; None for the model of `mesh serve`."""

    @property
    def setup(self) -> str:
        """Fingerprint of all settings that its stages are loaded with."""

    @property
    def pipeline(self) -> Pipeline:
        """Its stages and replicas."""


def ring_fault(stages: Sequence[SavedStage], num_layers: int) -> str | None:
    """Reason why recorded stages are no whole ring; None if they are one.

    A ring is whole if its stages, in their order, hold each layer of the model once, in processes of their
    own that serve, with sessions of one length.

    Args:
        stages: In pipeline order.
        num_layers: Layers of the model.
    """
    held_to = 0
    for stage in stages:
        if stage.start > held_to:
            break
        if stage.start < held_to or stage.stop <= stage.start:
            return f"{stage.actor} follows layer {held_to} and holds [{stage.start}, {stage.stop})"
        if stage.address is None or stage.wire not in _WIRES:
            return f"{stage.actor} does not serve in a way that is known here"
        held_to = stage.stop
    else:
        if held_to > num_layers:
            return f"they hold {held_to} layers, and the model has {num_layers}"
        if held_to == num_layers:
            return _common_fault(stages)
    return f"no stage holds layer {held_to} of {num_layers}"


def _common_fault(stages: Sequence[SavedStage]) -> str | None:
    if len({stage.actor for stage in stages}) < len(stages):
        return "a process is named twice"
    if len({stage.ctx_size for stage in stages}) > 1:
        return "their sessions differ in length"
    return None


def end_ring(driver: RayDriver, ring: SavedRing) -> None:
    """End all processes of a ring that a former head recorded; those that have ended are passed over."""
    for stage in (*ring.stages, *ring.copies):
        _end(driver, stage.actor)


def _end(driver: RayDriver, actor: str) -> bool:
    """End a process; returns whether it ran."""
    try:
        driver.kill(driver.find(actor))
    except MeshError as error:
        log.debug("process_had_ended", reason=error.message)
        return False
    return True


def returned_host(head: Head, stage: SavedStage) -> Member:
    """The host of a recorded stage, in the membership in which it loaded the stage.

    Raises:
        StageFailed: If it has not returned, or the stage listens at an address that the host had before.
    """
    for member in head.members:
        if member.ray_node_name == stage.ray_node:
            if stage.address is not None and split_address(stage.address)[0] != member.address:
                raise StageFailed(f"host {member.name} has the address {member.address} now")
            return member
    raise StageFailed(f"host {stage.host} has not returned")


async def adopted(handle: StageHandle, stage: SavedStage) -> StageHandle:
    """The handle of a stage that runs, and holds what the handle was made for. It is ended otherwise.

    Raises:
        StageFailed: With the reason why it is none.
    """
    try:
        handle.adopt(stage.actor, stage.address)
        await handle.confirm(_ANSWER_S)
    except MeshError:
        handle.kill()
        raise
    return handle


def _log_refusal(stage: SavedStage, error: MeshError) -> None:
    log.warning("stage_not_taken_over", stage=stage.actor, reason=error.message)


def saved_model(model: RestorableModel) -> SavedModel:
    """Record of a model that was loaded beside the first.

    Raises:
        ValueError: If it is the first.
    """
    if model.load_request is None:
        raise ValueError("the model of `mesh serve` is no model of `mesh load`")
    order, pipeline = model.load_request.model_dump(mode="json"), model.pipeline
    return SavedModel(order, model.setup, _saved_stages(pipeline), _saved_replicas(pipeline))


def head_state(
    head: Head,
    first: ServedModel,
    models: tuple[SavedModel, ...],
    term: int,
    *,
    undecided: SavedRing | None = None,
) -> HeadState:
    """State for the next head.

    Args:
        head: The open head.
        first: The model that `mesh serve` was started with.
        models: Models that were loaded beside it and are to be loaded again.
        term: Term of this head.
        undecided: The former head's ring of the first model, until it is known whether it is taken over.
    """
    admissions = head.service.admissions
    token = admissions.token
    return HeadState(
        term=term,
        ray=head.node.record,
        secret=token.secret,
        expires_at_s=token.expires_at_s,
        rejoin_secrets=dict(admissions.rejoin_secrets),
        evicted=admissions.evicted,
        join_port=split_address(token.addresses[0])[1],
        certificate_pem=head.certificate.certificate_pem.decode(),
        private_key_pem=head.certificate.private_key_pem.decode(),
        setup=first.setup if undecided is None else undecided.setup,
        stages=_saved_stages(first.pipeline) if undecided is None else undecided.stages,
        copies=_saved_replicas(first.pipeline) if undecided is None else undecided.copies,
        models=models,
    )


def _saved_stages(pipeline: Pipeline) -> tuple[SavedStage, ...]:
    """The ring as it is, if that is all that it should be: a part of a ring is of no use to the next head."""
    handles = pipeline.handles
    is_whole = not pipeline.lost and all(handle.serves_at is not None for handle in handles)
    return tuple(map(_saved_stage, handles)) if is_whole else ()


def _saved_replicas(pipeline: Pipeline) -> tuple[SavedStage, ...]:
    return tuple(_saved_stage(handle) for handle in pipeline.replicas)


def _saved_stage(handle: StageHandle) -> SavedStage:
    config = handle.config
    return SavedStage(
        actor=handle.actor_name,
        host=handle.member.name,
        ray_node=handle.member.ray_node_name,
        start=config.layers.start,
        stop=config.layers.stop,
        num_threads=config.options.num_threads,
        wire=str(config.hidden_type),
        address=handle.serves_at,
        ctx_size=config.options.ctx_size,
    )


def kill_unrecorded_actors(driver: RayDriver, former: HeadState) -> None:
    """End all processes that the former head started and did not record.

    Args:
        driver: Connected to the former head's Ray; it has started nothing yet.
        former: State that the former head recorded.
    """
    rings: tuple[SavedRing, ...] = (former, *former.models)
    kept = {stage.actor for ring in rings for stage in (*ring.stages, *ring.copies)}
    for name in driver.names():
        if name not in kept and _end(driver, name):
            log.info("unfinished_process_ended", process=name)
