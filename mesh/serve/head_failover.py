"""Head failover: state for the next head, takeover of its stages, end of unrecorded actors."""

from __future__ import annotations

import asyncio
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
    from collections.abc import Callable, Iterable, Sequence

    from mesh.api.load_request import LoadRequest
    from mesh.cluster.members import Member
    from mesh.cluster.ray_driver import RayDriver
    from mesh.placement.host_capacity import HostCapacity
    from mesh.serve.head import Head
    from mesh.serve.head_state import SavedRing
    from mesh.serve.pipeline import Pipeline
    from mesh.serve.preflight import Preflight
    from mesh.serve.served_model import ServedModel
    from mesh.serve.stage_factory import StageMaker
    from mesh.serve.stage_handle import StageHandle


log = structlog.get_logger()

# Hosts look for the head every second or so.
_WAIT_FOR_HOSTS_S: Final = 8.0
_WAIT_FOR_SPARES_S: Final = 2.0
_ANSWER_S: Final = 2.0


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
        self._sizes = StageSizes(known.model, known.workload)
        self._head = head
        self._maker = maker
        self._pipeline = pipeline
        self._setup = setup
        self._capacity_of = capacity_of

    async def run(self, former: SavedRing) -> bool:
        """Take over the ring if all of it is left; end what is left otherwise.

        Args:
            former: Ring of the model, as the former head recorded it.

        Returns:
            Whether the ring was taken over.

        Raises:
            MeshError: If the model cannot be cut.
        """
        if not former.stages:
            return False
        if former.setup == self._setup:
            # Until it is known whether they run, their memory counts as used.
            self._pipeline.intended = tuple(map(self._placement, former.stages))
            await self._maker.describe(
                (stage.host, LayerRange(stage.start, stage.stop))
                for stage in (*former.stages, *former.copies)
            )
            await self._wait_for(former.stages, _WAIT_FOR_HOSTS_S)
            # A replica is worth a short wait only: the mesh can serve without.
            await self._wait_for(former.copies, _WAIT_FOR_SPARES_S)
            ring = [await self._adopt(stage) for stage in former.stages]
            replicas = [await self._adopt(stage) for stage in former.copies]
            handles = [handle for handle in ring if handle is not None]
            self._pipeline.replicas = [handle for handle in replicas if handle is not None]
            if len(handles) == len(ring):
                self._pipeline.stages = tuple(
                    PipelineStage(self._placement(stage), HiddenType(stage.wire), handle)
                    for stage, handle in zip(former.stages, handles, strict=True)
                )
                self._pipeline.intended = ()
                log.info("stages_taken_over", stages=len(ring), copies=len(self._pipeline.replicas))
                return True
            # Remaining stages help the next plan no more than any host's stage files do: they are ended.
            self._pipeline.replicas += handles
        else:
            log.info("begins_anew", reason="the model or the options have changed")
            for stage in (*former.stages, *former.copies):
                self._end(stage)
        await self._pipeline.stop()
        return False

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

    async def _adopt(self, stage: SavedStage) -> StageHandle | None:
        member = next((each for each in self._head.members if each.ray_node_name == stage.ray_node), None)
        try:
            if member is None:
                self._end(stage)
                raise StageFailed(f"host {stage.host} has not returned")
            handle = self._maker.make(
                self._placement(stage), member, wire=HiddenType(stage.wire), num_threads=stage.num_threads
            )
            handle.adopt(stage.actor, stage.address)
            loss = await handle.loss(_ANSWER_S)
            if loss is None:
                return handle
            handle.kill()
            raise StageFailed(loss.reason)
        except MeshError as error:
            log.warning("stage_not_taken_over", stage=stage.actor, reason=error.message)
            return None

    def _end(self, stage: SavedStage) -> None:
        try:
            self._head.driver.kill(self._head.driver.find(stage.actor))
        except MeshError as error:
            log.debug("stage_had_ended", reason=error.message)

    def _placement(self, stage: SavedStage) -> StagePlacement:
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


def head_state(head: Head, first: ServedModel, others: Iterable[RestorableModel], term: int) -> HeadState:
    """State for the next head.

    Args:
        head: The open head.
        first: The model that `mesh serve` was started with.
        others: Models that were loaded beside it and answer by now.
        term: Term of this head.
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
        setup=first.setup,
        stages=_saved_stages(first.pipeline),
        copies=_saved_replicas(first.pipeline),
        models=tuple(
            SavedModel(
                model.load_request.model_dump(),
                model.setup,
                _saved_stages(model.pipeline),
                _saved_replicas(model.pipeline),
            )
            for model in others
            if model.load_request is not None
        ),
    )


def _saved_stages(pipeline: Pipeline) -> tuple[SavedStage, ...]:
    return tuple(_saved_stage(handle) for handle in pipeline.handles if handle.serves_at is not None)


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
        if name not in kept:
            try:
                driver.kill(driver.find(name))
            except MeshError as error:
                log.debug("process_had_ended", reason=error.message)
            else:
                log.info("unfinished_process_ended", process=name)
