"""Draining and eviction of hosts."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import structlog

from mesh.serve.stage_handle import StageLoss
from spanmesh_proto.errors import ClusterError, JoinError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator

    from mesh.cluster.members import Member, Members
    from mesh.cluster.membership_server import MembershipService
    from mesh.serve.failures import Incidents
    from mesh.serve.pipeline import Pipeline

# Longest time that a leaving host waits if no other host can hold its layers: another one may join.
_STUCK_S: Final = 15.0
# Hosts that are to leave are looked at when a host changes, and at least at this interval.
_POLL_S: Final = 1.0
_EVICTED: Final = StageLoss("its host was evicted")

log = structlog.get_logger()


class WithIncidents(Protocol):
    """State of a model that has failures."""

    @property
    def incidents(self) -> Incidents:
        """Its recent failures."""


class OnHosts(Protocol):
    """A model that hosts hold."""

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """All that it has on hosts."""

    @property
    def state(self) -> WithIncidents:
        """Its state."""


class HostDraining:
    """Hosts that are to leave, and the requests that wait for their departure.

    Args:
        members: Hosts.
        service: Membership service for the hosts.
        pipelines: Returns the pipelines of all models, each with its record of failures.
        on_new_token: Called when the join token was replaced.
        clock_s: Monotonic clock, seconds.
        until_written: Returns once the head state is durable; see `HeadStateWriter.written`.
    """

    def __init__(
        self,
        members: Members,
        service: MembershipService,
        pipelines: Callable[[], Iterable[tuple[Pipeline, Incidents]]],
        *,
        on_new_token: Callable[[], None],
        clock_s: Callable[[], float],
        until_written: Callable[[], Awaitable[None]],
    ) -> None:
        self._members = members
        self._service = service
        self._pipelines = pipelines
        self._on_new_token = on_new_token
        self._clock_s = clock_s
        self._until_written = until_written
        # By Ray node: a host that was lost and joins again is not to leave.
        self._drains: dict[str, asyncio.Future[None]] = {}
        self._stuck_since_s: dict[str, float] = {}
        self._let_go: set[str] = set()

    @property
    def leaving(self) -> tuple[Member, ...]:
        """Members that are to leave."""
        return tuple(member for member in self._members if member.is_leaving)

    async def drain(self, name: str) -> dict[str, Any]:
        """Move a host's layers and release it; returns when that is done. JSON-serialisable.

        Returns:
            `drained` is false if the host was lost meanwhile; its layers are then repaired.

        Raises:
            JoinError: If there is no such host.
            ClusterError: If no other host can hold its layers, then it stays; or if it has left, but the head
                state cannot be written.
        """
        member = self._members.find(name)
        if member is None:
            raise JoinError(f"no host is named {name!r}; `mesh status` lists them")
        log.info("host_to_be_drained", host=name)
        done = self._drains.setdefault(member.ray_node_name, asyncio.get_running_loop().create_future())
        self._members.update(name, is_leaving=True)
        departure = asyncio.create_task(self._departure(member))
        try:
            await asyncio.wait({done, departure}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            departure.cancel()
            await asyncio.gather(departure, return_exceptions=True)
        if done.done():
            done.result()
        else:
            log.warning("host_lost_while_drained", host=name)
            self._drains.pop(member.ray_node_name, None)
        await self._until_written()
        return {"host": name, "drained": done.done()}

    async def evict(self, name: str) -> dict[str, Any]:
        """Disconnect a host at once; its stages count as lost. JSON-serialisable.

        Returns when the head state is durable: after a crash of the head the host cannot rejoin with the
        former token.

        Raises:
            JoinError: If no such host has joined.
            ClusterError: If the host is disconnected, but the head state cannot be written.
        """
        member = self._members.find(name)
        self._service.evict(name)
        for pipeline, incidents in self._pipelines():
            for index, stage in enumerate(pipeline.stages):
                if stage.handle is not None and stage.handle.member.name == name:
                    pipeline.mark_lost(index)
                    incidents.failed(name, str(stage.placement.layers), _EVICTED.reason)
        self.drop_replicas(name)
        if member is not None:
            self._finish(member)
        self._on_new_token()
        await self._until_written()
        return {"host": name, "evicted": True}

    def drop_replicas(self, name: str) -> None:
        """End the replicas on a host."""
        for pipeline, _incidents in self._pipelines():
            for replica in [replica for replica in pipeline.replicas if replica.member.name == name]:
                pipeline.drop_replica(replica)

    @asynccontextmanager
    async def releasing(self) -> AsyncIterator[None]:
        """Context in which hosts that are to leave are released as soon as they hold nothing."""
        task = asyncio.create_task(self._release_free())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _release_free(self) -> NoReturn:
        while True:
            for member in self.leaving:
                self.release_if_free(member)
            await self._members.change_within(_POLL_S)

    def release_if_free(self, member: Member) -> bool:
        """Release a host once no model has or intends layers there; returns whether it was free."""
        is_free = not any(
            any(stage.is_on(member) for stage in pipeline.stages)
            or any(placement.host == member.name for placement in pipeline.intended)
            for pipeline, _incidents in self._pipelines()
        )
        if is_free:
            self.release(member, "no layers of the mesh are left on this host")
        return is_free

    def release(self, member: Member, state: str) -> None:
        """Release a host that holds nothing, or has waited for too long. Later calls have no effect."""
        if member.ray_node_name not in self._let_go:
            self._let_go.add(member.ray_node_name)
            self.drop_replicas(member.name)
            self._service.dismiss(member.name, state)
        self._finish(member)

    def report_stuck(self, name: str, reason: str) -> None:
        """Handle that no other host can hold the layers of a host; no effect unless that is to leave.

        A drain is cancelled. A host that leaves by itself is told, and leaves after a while.
        """
        member = self._members.find(name)
        if member is None or not member.is_leaving:
            return
        drain = self._drains.pop(member.ray_node_name, None)
        if drain is not None:
            self._members.update(name, is_leaving=False)
            if not drain.done():
                drain.set_exception(ClusterError(f"{name} cannot be drained: {reason}"))
                # The client that asked may have disconnected.
                drain.exception()
            return
        now_s = self._clock_s()
        since_s = self._stuck_since_s.setdefault(member.ray_node_name, now_s)
        if since_s == now_s:
            log.warning("host_cannot_be_drained", host=name, reason=reason, leaves_in_s=_STUCK_S)
            self._service.announce(name, f"{reason}; it leaves anyway in {_STUCK_S:g} s")
        elif now_s - since_s >= _STUCK_S:
            self.release(member, "left, though no other host could hold its layers")

    async def _departure(self, member: Member) -> None:
        """Return once a host is gone; it may have joined again."""
        while True:
            now = self._members.find(member.name)
            if now is None or now.ray_node_name != member.ray_node_name:
                return
            await self._members.changed()

    def _finish(self, member: Member) -> None:
        self._stuck_since_s.pop(member.ray_node_name, None)
        drain = self._drains.pop(member.ray_node_name, None)
        if drain is not None and not drain.done():
            drain.set_result(None)


def pipelines_of(models: Iterable[OnHosts]) -> Iterator[tuple[Pipeline, Incidents]]:
    """All that models have on hosts, each with the failures of its model."""
    for model in models:
        for pipeline in model.pipelines:
            yield pipeline, model.state.incidents
