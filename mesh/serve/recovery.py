"""Recovery of a broken ring: finds the survivors, replaces what is lost, tries again until it succeeds."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from mesh.coordinator.ring import RingLoss
from spanmesh_proto.errors import InvalidModel, MeshError, ModelDoesNotFit, NotEnoughHosts, StageFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from mesh.cluster.members import Member
    from mesh.placement.replanner import Replan
    from mesh.serve.pipeline import Pipeline
    from mesh.serve.reconfiguration import RecoveryContext
    from mesh.serve.stage_handle import StageHandle, StageLoss

# Timeout of the ping to a stage that already left the ring's pings unanswered for more than a second.
_SILENT_S: Final = 0.4
# Timeout for other suspects. A running process answers within milliseconds, on a busy machine within
# hundreds.
_SUSPECT_S: Final = 0.7
# Timeout for the rest: waiting costs less than loading a stage that still runs.
_OTHERS_S: Final = 2.0
# After a failed attempt: time for processes that are ending, longer after each attempt.
_FIRST_PAUSE_S: Final = 0.3
_MOST_PAUSE_S: Final = 3.0
# A host that failed this often during one recovery is left out until the next one.
_MOST_STRIKES: Final = 2
# Without a change among the hosts a placement is tried again after this time.
_RETRY_S: Final = 3.0
_RETRY_AFTER_S: Final = 10

log = structlog.get_logger()


@dataclass(frozen=True)
class SurvivorReport:
    """Survivors of a broken ring."""

    lost: Mapping[int, StageLoss]
    """Reason by ring index, for each stage that is gone."""
    dead_replicas: tuple[StageHandle, ...]
    """Replicas that are gone."""
    hosts: frozenset[str]
    """Names of members that answered."""


class RingRepair:
    """Recovery from one loss, in as many rounds as it takes: failures in one round are handled in the next.

    Args:
        context: Parts that it works with.
        on_waiting: Called with the reason in each round that ends with a wait for hosts or for the model.
    """

    def __init__(
        self, context: RecoveryContext, on_waiting: Callable[[MeshError], None] = lambda _error: None
    ) -> None:
        self._context = context
        self._on_waiting = on_waiting
        self._strikes: Counter[str] = Counter()
        self._refused: InvalidModel | None = None
        self._announced = ""

    async def run(self, loss: RingLoss) -> None:
        """Recover; returns when the ring is whole.

        Args:
            loss: Loss of the ring.
        """
        context = self._context
        started_s = context.clock_s()
        log.error("ring_broken", reason=loss.reason, suspects=loss.suspects)
        context.announce("repairing")
        suspected, pause_s = loss, _FIRST_PAUSE_S
        while True:
            hosts = context.nodes_ready
            try:
                decision = await self._decide(suspected)
            except (ModelDoesNotFit, NotEnoughHosts) as error:
                # Hosts that could not load the model may have been left out.
                await self._wait_for_change(self._refused or error, hosts)
            else:
                try:
                    await self._carry_out(decision)
                    break
                except MeshError as error:
                    log.warning("repair_goes_on", reason=error.message)
                    if isinstance(error, InvalidModel) and error is not self._refused:
                        # Not a host that cannot load it: it cannot be sent to any.
                        await self._wait_for_change(error, hosts)
                    else:
                        await asyncio.sleep(pause_s)
                        pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            # From the second round on all stages are treated alike.
            suspected = RingLoss(loss.reason, ())
        took_s = context.clock_s() - started_s
        context.incidents.repaired(took_s)
        log.info("repaired", seconds=round(took_s, 3), how=decision.reason)
        context.announce("serving")

    async def _decide(self, loss: RingLoss) -> Replan:
        context = self._context
        report = await probe_survivors(context.pipeline, loss, tuple(context.members), context.is_there)
        for index, lost in report.lost.items():
            self._record_loss(index, lost)
        for replica in report.dead_replicas:
            context.pipeline.drop_replica(replica)
        return await context.decide_placement(
            lambda: context.pipeline.lost,
            lambda: (
                member
                for member in context.members.ready
                if member.name in report.hosts and self._strikes[member.name] < _MOST_STRIKES
            ),
        )

    def _record_loss(self, index: int, loss: StageLoss) -> None:
        context, stage = self._context, self._context.pipeline.stages[index]
        context.pipeline.mark_lost(index)
        layers = str(stage.placement.layers)
        log.error("stage_gone", stage=index, host=stage.placement.host, layers=layers, reason=loss.reason)
        failure = context.incidents.failed(stage.placement.host, layers, loss.reason)
        if stage.handle is not None:
            context.on_failure(failure, loss, stage.handle.member)

    async def _carry_out(self, decision: Replan) -> None:
        context = self._context
        log.info("repair_planned", how=decision.reason)
        stages = await context.executor.load_stages(decision, context.wires(decision), self._on_stage_error)
        await context.cutover.cut_over(stages, decision.reason, self._on_stage_error)

    def _on_stage_error(self, handle: StageHandle, error: MeshError) -> None:
        host = handle.member.name
        self._strikes[host] += 1
        if isinstance(error, InvalidModel):
            self._refused = error
        log.warning("stage_in_trouble", host=host, layers=str(handle.config.layers), reason=error.message)
        if self._strikes[host] >= _MOST_STRIKES:
            for index, stage in enumerate(self._context.pipeline.stages):
                if stage.handle is handle:
                    self._context.pipeline.mark_lost(index)

    async def _wait_for_change(self, error: MeshError, hosts: frozenset[str]) -> None:
        """Wait until the hosts differ from those with which it failed, for a while; a file may change too."""
        context = self._context
        if error.message != self._announced:
            self._announced = error.message
            log.error("mesh_cannot_serve", reason=error.message)
            awaited = "the model" if isinstance(error, InvalidModel) else "hosts"
            context.announce(f"waiting for {awaited}: {error.message}")
            context.coordinator.give_up(StageFailed(error.message, retry_after_s=_RETRY_AFTER_S))
        self._strikes.clear()
        self._refused = None
        self._on_waiting(error)
        if context.nodes_ready == hosts:
            await context.members.change_within(_RETRY_S)


async def probe_survivors(
    pipeline: Pipeline,
    loss: RingLoss,
    members: Collection[Member],
    is_there: Callable[[Member, float], Awaitable[bool]],
) -> SurvivorReport:
    """Ping stages and hosts; takes as long as the slowest answer or the shortest timeout that expires.

    Args:
        pipeline: Stages and replicas.
        loss: Loss of the ring, with its suspects.
        members: Hosts.
        is_there: Whether a host answers within some seconds.
    """
    suspects, silent = _hosts(pipeline, loss.suspects), _hosts(pipeline, loss.silent)

    def patience_s(host: str, innocent_s: float) -> float:
        if host in silent:
            return _SILENT_S
        return _SUSPECT_S if host in suspects else innocent_s

    handles = {
        index: pipeline_stage.handle
        for index, pipeline_stage in enumerate(pipeline.stages)
        if pipeline_stage.handle is not None
    }
    losses, replicas, hosts = await asyncio.gather(
        asyncio.gather(*(stage.loss(patience_s(stage.member.name, _OTHERS_S)) for stage in handles.values())),
        asyncio.gather(
            *(replica.loss(patience_s(replica.member.name, _SUSPECT_S)) for replica in pipeline.replicas)
        ),
        asyncio.gather(*(is_there(member, patience_s(member.name, _OTHERS_S)) for member in members)),
    )
    return SurvivorReport(
        lost={index: loss for index, loss in zip(handles, losses, strict=True) if loss is not None},
        dead_replicas=tuple(
            replica for replica, loss in zip(pipeline.replicas, replicas, strict=True) if loss is not None
        ),
        hosts=frozenset(member.name for member, there in zip(members, hosts, strict=True) if there),
    )


def _hosts(pipeline: Pipeline, stages: Collection[int]) -> frozenset[str]:
    return frozenset(
        pipeline.stages[index].placement.host for index in stages if index < len(pipeline.stages)
    )
