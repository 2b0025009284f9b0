"""How a copy of a stage follows it: what the stage computes arrives here as well, a second or so later.

So a repair that puts the copy in the stage's place has little left to compute. DéjàVu (Strati et al. 2024)
copies KV caches between stages for the same purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
import structlog

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import MeshError
from stages.transport.channels import key_metadata, open_channel
from stages.transport.stage_link import explain

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from stages.transport.channels import Identity

log = structlog.get_logger()


class Follower:
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
            async for news in stub.Follow(request, metadata=key_metadata(self._mesh_key)):
                await self._take(news)
            log.info("stage_left", address=self._address)
        except grpc.aio.AioRpcError as error:
            log.info("stage_lost", address=self._address, reason=explain(error, self._address).message)
        except MeshError as error:
            self.is_unfit = True
            log.warning("stage_not_followed", address=self._address, reason=error.message)
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await self._channel.close(None)
