"""KV replication: streams a stage's KV rows to its replicas, source and sink.

So a repair that puts the copy in the stage's place has little left to compute. DéjàVu (Strati et al. 2024)
copies KV caches between stages for the same purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

import grpc
import structlog

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import MeshError, ProtocolError
from stages.serving.kv_cache import ReplicationCursor
from stages.transport.channels import key_metadata, open_channel
from stages.transport.stage_link import explain

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from stages.serving.stage_engine import StageEngine
    from stages.transport.channels import Identity


log = structlog.get_logger()


class ReplicationSink:
    """The copy's end; runs until the stage ends or lets go of it, or `close`.

    Args:
        address: `host:port` of the stage.
        host: Name of the host that must answer there.
        hello: Of the stage's ring.
        mesh_key: Of the stage's ring.
        identity: What this process shows there; None if both ends are in one process.
        held: What the copy has from before.
        take: Called with everything that arrives, in order.

    Attributes:
        is_unfit: Whether the copy could not take what the stage has: on other hardware llama.cpp may keep it
            in another form.
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
        """Whether nothing more will arrive."""
        return self._task.done()

    def does_for(self, address: str, mesh_id: str) -> bool:
        """Whether there is no use in another one for the stage that serves there, in that ring."""
        is_same = (address, mesh_id) == (self._address, self._mesh_id)
        return is_same and (self.is_unfit or not self.is_over)

    async def close(self) -> None:
        """Let go of the stage; nothing is taken after that."""
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


# Two copies there are, and those that were told to follow anew before their old streams have ended.
_MOST_FOLLOWERS: Final = 8
_UPDATE_S: Final = 0.5
# What it costs the stage, its host's processor and the link, of the time.
_SHARE: Final = 0.1


def pause_s(took_s: float) -> float:
    """How long a stage waits before it tells a copy more.

    Args:
        took_s: How long it took to tell the latest, until the copy had taken all but the last of it.
    """
    return max(_UPDATE_S, took_s / _SHARE)


class ReplicationSource:
    """All who follow one stage.

    Args:
        engine: The stage's sessions and slots.
        num_slots: That exist.
        pause_s: How long to wait between two rounds, given how long the one took, in seconds.
    """

    def __init__(
        self, engine: StageEngine, num_slots: int, pause_s: Callable[[float], float] = pause_s
    ) -> None:
        self._engine = engine
        self._num_slots = num_slots
        self._pause_s = pause_s
        self._leaving: set[asyncio.Event] = set()

    def refusal(self, request: wire.FollowRequest) -> ProtocolError | None:
        """Why a copy is not told anything; None if it is."""
        if len(self._leaving) >= _MOST_FOLLOWERS:
            return ProtocolError(f"{len(self._leaving)} copies follow this stage: no more may")
        if len(request.held) > self._num_slots:
            return ProtocolError(f"a copy tells of {len(request.held)} slots, {self._num_slots} exist")
        return None

    async def updates(self, request: wire.FollowRequest) -> AsyncGenerator[wire.SlotRows, None]:
        """What the copy does not have, round by round, until `close`. Ask for a `refusal` first."""
        leaving = asyncio.Event()
        self._leaving.add(leaving)
        cursor = ReplicationCursor(self._num_slots)
        try:
            await self._engine.attach_cursor(cursor, request.held)
            while not leaving.is_set():
                started_s = time.monotonic()
                async for update in self._engine.updates(cursor):
                    yield update
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(leaving.wait(), self._pause_s(time.monotonic() - started_s))
        finally:
            self._leaving.discard(leaving)
            self._engine.detach_cursor(cursor)

    def close(self) -> None:
        """End with everybody."""
        for leaving in self._leaving:
            leaving.set()
