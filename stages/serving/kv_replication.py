"""KV replication: streams a stage's KV rows to its replicas, source and sink.

With them a recovery that turns a replica into a stage has little left to compute. DéjàVu (Strati et al. 2024)
copies KV caches between stages for the same purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from typing import TYPE_CHECKING, Final

import grpc
import structlog

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import MeshError, ProtocolError
from stages.serving.plugs import StagePlug
from stages.serving.ring_place import hello_of
from stages.serving.slot_replication import ReplicationCursor, SlotReplication
from stages.transport.channels import key_metadata, open_channel
from stages.transport.links import explain

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from stages.serving.plugs import StageAccess
    from stages.transport.channels import Identity

# Two replicas, and further streams that have not yet ended.
_MOST_FOLLOWERS: Final = 8
_UPDATE_S: Final = 0.5
# Share of time that replication may take from the stage, its host's processor and the link.
_SHARE: Final = 0.1

log = structlog.get_logger()


class ReplicationSink:
    """The replica's end; runs until the stage ends the stream, or `close`.

    Args:
        address: `host:port` of the stage.
        host: Name of the host that must answer there.
        hello: First message, for the stage's ring.
        mesh_key: Key of the stage's ring.
        identity: TLS identity of this process; None if both ends are in one process.
        held: Positions that the replica already holds.
        take: Called with every update, in order.

    Attributes:
        is_unfit: Whether the replica rejected the rows: on other hardware llama.cpp may save them in another
            form.
    """

    def __init__(
        self,
        address: str,
        host: str,
        hello: wire.Hello,
        mesh_key: str,
        identity: Identity | None,
        *,
        held: Callable[[], Awaitable[Sequence[wire.HeldSlot]]],
        take: Callable[[wire.SlotRows], Awaitable[None]],
    ) -> None:
        self._address = address
        self._mesh_id = hello.mesh_id
        self._hello = hello
        self._mesh_key = mesh_key
        self._held = held
        self._take = take
        self._channel = open_channel(address, host, identity)
        self.is_unfit = False
        self._task = asyncio.create_task(self._run())

    @property
    def is_over(self) -> bool:
        """Whether the stream has ended."""
        return self._task.done()

    def does_for(self, address: str, mesh_id: str) -> bool:
        """Whether it follows the stage at this address in this ring, or could not."""
        is_same = (address, mesh_id) == (self._address, self._mesh_id)
        return is_same and (self.is_unfit or not self.is_over)

    async def close(self) -> None:
        """End the stream; no update is applied after that."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            request = wire.FollowRequest(hello=self._hello, held=await self._held())
            stub = rpc.StageStub(self._channel)
            async for update in stub.Follow(request, metadata=key_metadata(self._mesh_key)):
                await self._take(update)
            log.info("stage_left", address=self._address)
        except grpc.aio.AioRpcError as error:
            log.info("stage_lost", address=self._address, reason=explain(error, self._address).message)
        except MeshError as error:
            self.is_unfit = True
            log.warning("stage_not_followed", address=self._address, reason=error.message)
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await self._channel.close(None)


class ReplicationSource:
    """The stage's end: streams to all of its replicas.

    Args:
        stage: The stage.
        rows: Rows of its slots.
        pause_s: Returns the pause after a round, in seconds, from its duration.
    """

    def __init__(self, stage: StageAccess, rows: SlotReplication, pause_s: Callable[[float], float]) -> None:
        self._stage = stage
        self._rows = rows
        self._pause_s = pause_s
        self._leaving: set[asyncio.Event] = set()

    def updates(self, request: wire.FollowRequest) -> AsyncGenerator[wire.SlotRows, None]:
        """Updates for a replica, round by round, until `close`.

        Raises:
            ProtocolError: If the replica may not follow.
        """
        num_slots = self._stage.sessions.num_slots
        if len(self._leaving) >= _MOST_FOLLOWERS:
            raise ProtocolError(f"{len(self._leaving)} replicas follow this stage: no more are allowed")
        if len(request.held) > num_slots:
            raise ProtocolError(f"a replica names {len(request.held)} slots, {num_slots} exist")
        return self._updates(request)

    async def _updates(self, request: wire.FollowRequest) -> AsyncGenerator[wire.SlotRows, None]:
        leaving = asyncio.Event()
        self._leaving.add(leaving)
        cursor = ReplicationCursor(self._stage.sessions.num_slots)
        try:
            await self._stage.in_worker(lambda: self._rows.attach_cursor(cursor, request.held))
            while not leaving.is_set():
                started_s = time.monotonic()
                async for update in self._round(cursor):
                    yield update
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(leaving.wait(), self._pause_s(time.monotonic() - started_s))
        finally:
            self._leaving.discard(leaving)
            self._stage.between_batches(lambda: self._rows.detach_cursor(cursor))

    async def _round(self, cursor: ReplicationCursor) -> AsyncGenerator[wire.SlotRows, None]:
        """Updates of the open sessions, slot by slot; windows are computed between two of them."""
        stage = self._stage
        for session, slot in stage.sessions.slots.items():
            read = functools.partial(self._rows.updates, slot, session, cursor, stage.sent_row_bytes)
            for message in await stage.in_worker(read):
                yield message

    def close(self) -> None:
        """End all streams."""
        for leaving in self._leaving:
            leaving.set()


class Replication(StagePlug):
    """Replication of one stage: to its replicas, and as a replica itself.

    Args:
        identity: Returns the TLS identity for the connection to a followed stage; None within one process.
        pause_s: Returns the pause after a round of updates, in seconds, from its duration.

    Attributes:
        rows: Rows of the stage's slots.
        sink: The stream of the followed stage, while there is one.
    """

    def __init__(self, identity: Callable[[], Identity] | None, pause_s: Callable[[float], float]) -> None:
        self._identity = identity
        self._pause_s = pause_s
        self._stage: StageAccess
        self._source: ReplicationSource
        self.rows: SlotReplication
        self.sink: ReplicationSink | None = None

    def attach(self, stage: StageAccess) -> None:
        """Listen to changes of slots."""
        self._stage = stage
        self.rows = SlotReplication(stage.slots)
        self._source = ReplicationSource(stage, self.rows, self._pause_s)

    def streams(self) -> Mapping[str, Callable[[wire.FollowRequest], AsyncGenerator[wire.SlotRows, None]]]:
        """KV rows of the sessions here, for a replica of the stage."""
        return {"Follow": self._source.updates}

    async def leaving(self) -> None:
        """End the stream of the followed stage, and those of later calls of `follow`."""
        while self.sink is not None:
            await self._stop_sink()

    def left(self) -> None:
        """End the streams to replicas."""
        self._source.close()

    async def stop(self) -> None:
        """End the stream of the followed stage."""
        await self._stop_sink()

    async def follow(self, address: str, host: str, mesh_id: str, mesh_key: str, term: int) -> None:
        """Follow a stage of a ring as its replica, until this stage takes a place in a ring itself.

        Args:
            address: `host:port` of that stage. No effect if it is followed already, or could not be.
            host: Name of the host that must answer there.
            mesh_id: Identifier of its ring.
            mesh_key: Key of that ring.
            term: Term of the calling coordinator.

        Raises:
            ProtocolError: If a coordinator of a higher term took over meanwhile.
        """
        stage = self._stage
        stage.accept(term, f"the coordinator of the replica of stage {stage.place.stage_index}")
        if self.sink is not None and self.sink.does_for(address, mesh_id):
            return
        place = stage.place
        await self._stop_sink()
        if stage.place is not place or self.sink is not None:
            # A later call came in that time, and counts.
            return
        self.sink = ReplicationSink(
            address,
            host,
            hello_of(mesh_id, f"a replica of stage {place.stage_index}", term),
            mesh_key,
            None if self._identity is None else self._identity(),
            held=lambda: stage.in_worker(self.rows.held),
            take=self._apply_update,
        )

    async def _apply_update(self, update: wire.SlotRows) -> None:
        # If this replica becomes a stage meanwhile, the rows count: their tokens are compared.
        self._stage.sessions.adopt(update.slot, update.session)
        await self._stage.in_worker(lambda: self.rows.apply_update(update))

    async def _stop_sink(self) -> None:
        sink, self.sink = self.sink, None
        if sink is not None:
            await sink.close()


def pause_s(took_s: float) -> float:
    """Pause between two rounds of updates.

    Args:
        took_s: Duration of the last round, until the replica had received all but the last update.
    """
    return max(_UPDATE_S, took_s / _SHARE)
