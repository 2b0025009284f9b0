"""Links: ordered streams of frames to the next stage, the choice among their kinds, and that over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc
import structlog

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import HostUnreachable, MeshError, StageFailed, from_code
from stages.transport.channels import key_metadata, open_channel

if TYPE_CHECKING:
    from collections.abc import Callable

    from stages.transport.channels import Identity

log = structlog.get_logger()
# The receiver's limit for one frame.
MOST_BUNDLED_WINDOWS: Final = 256
# Details with which gRPC replaces the peer's status if a write meets the end of a call: its issue 36066.
_OVERWRITTEN: Final = "Internal error from Core"
_REFUSAL_TIME_S: Final = 2.0
LinkMessage = wire.Vocabulary | wire.Open | wire.WindowBundle


class StageLink:
    """The link over gRPC, see `Link`.

    Args:
        address: `host:port` of the stage.
        hello: First frame, with the protocol version.
        mesh_key: Key shared by all stages and the coordinator.
        on_lost: Called once with the reason when the stream ends without `close`.
        host: Name of the host that must answer there.
        identity: TLS identity of this process; None if both ends are in one process.

    Attributes:
        num_messages: Messages that were given to `send` so far.
        num_sent_bytes: Size of all frames so far.
    """

    def __init__(
        self,
        address: str,
        hello: wire.Hello,
        mesh_key: str,
        on_lost: Callable[[MeshError], None],
        *,
        host: str = "",
        identity: Identity | None = None,
    ) -> None:
        self._address = address
        self._on_lost = on_lost
        self._hello = hello
        self._channel = open_channel(address, host, identity)
        self._metadata = key_metadata(mesh_key)
        self._call = self._new_call()
        self._waiting: asyncio.Queue[LinkMessage] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False
        self.num_messages = 0
        self.num_sent_bytes = 0

    async def open(self, timeout_s: float = 10) -> wire.Welcome:
        """Shake hands.

        Raises:
            ProtocolVersionMismatch: If the stage speaks another version.
            HostUnreachable: If the stage does not answer in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._call.write(wire.Frame(hello=self._hello))
                welcome = await self._call.read()
                if not isinstance(welcome, wire.Welcome):
                    # The stream ended at once: its status has the reason.
                    raise await self._reason()
        except TimeoutError:
            await self.close()
            raise HostUnreachable(f"{self._address} does not answer within {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            reason = await self._refusal() if error.details() == _OVERWRITTEN else None
            await self.close()
            raise reason or explain(error, self._address) from None
        except MeshError:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._watch())]
        return welcome

    def send(self, message: LinkMessage) -> None:
        """Queue a message. For the event loop."""
        self.num_messages += 1
        self._waiting.put_nowait(message)

    async def close(self) -> None:
        """End the stream."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._call.cancel()
        await self._channel.close(None)

    async def _write(self) -> None:
        try:
            while True:
                frame = frame_of(await self._waiting.get())
                await self._call.write(frame)
                self.num_sent_bytes += frame.ByteSize()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # see `_watch`
        except Exception as error:
            # Otherwise windows would wait here, and nothing would miss them.
            log.exception("link_failed", address=self._address)
            await self._end(StageFailed(f"the link to {self._address} failed: {error!r}"))

    async def _watch(self) -> None:
        try:
            while isinstance(await self._call.read(), wire.Welcome):
                pass
        except grpc.aio.AioRpcError:
            pass
        except Exception as error:
            log.exception("link_failed", address=self._address)
            await self._end(StageFailed(f"the link to {self._address} failed: {error!r}"))
        await self._end(await self._reason())

    async def _end(self, reason: MeshError) -> None:
        """Report the loss, once, and close: a lost link is not closed by its owner."""
        if self._is_closing:
            return
        self._is_closing = True
        self._on_lost(reason)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._call.cancel()
        await self._channel.close(None)

    def _new_call(self) -> grpc.aio.StreamStreamCall[wire.Frame, wire.Welcome]:
        call: grpc.aio.StreamStreamCall[wire.Frame, wire.Welcome] = rpc.StageStub(self._channel).Link(
            metadata=self._metadata
        )
        return call

    async def _refusal(self) -> MeshError | None:
        """Why the stage refuses calls, by one in which nothing is written; None if it takes it."""
        call = self._new_call()
        try:
            async with asyncio.timeout(_REFUSAL_TIME_S):
                await call.read()
        except grpc.aio.AioRpcError as error:
            return explain(error, self._address)
        except TimeoutError:
            pass
        finally:
            call.cancel()
        return None

    async def _reason(self) -> MeshError:
        code = await self._call.code()
        details = await self._call.details()
        mesh_code = _mesh_code(await self._call.trailing_metadata())
        text = details or code.name
        if mesh_code is not None:
            return from_code(mesh_code, text)
        return StageFailed(f"the link to {self._address} ended: {text}")


class Link(Protocol):
    """Sends sessions and windows to one stage, in order."""

    @property
    def num_messages(self) -> int:
        """Messages that were given to `send` so far."""

    @property
    def num_sent_bytes(self) -> int:
        """Size of all frames so far."""

    async def open(self) -> wire.Welcome:
        """Shake hands.

        Raises:
            ProtocolVersionMismatch: If the stage speaks another version.
            HostUnreachable: If the stage does not answer in time.
        """

    def send(self, message: LinkMessage) -> None:
        """Queue a message. For the event loop."""

    async def close(self) -> None:
        """End the stream."""


def explain(error: grpc.aio.AioRpcError, peer: str) -> MeshError:
    """The exception for a failed call to `peer`."""
    code = _mesh_code(error.trailing_metadata())
    text = error.details() or error.code().name
    if code is not None:
        return from_code(code, text)
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return HostUnreachable(f"{peer} does not answer: {text}")
    return StageFailed(f"{peer}: {text}")


def _mesh_code(metadata: Any) -> str | None:
    """The code of `spanmesh_proto.errors.WIRE` in the metadata of a status."""
    return next((str(value) for key, value in metadata or () if key == "x-mesh-code"), None)


def frame_of(message: LinkMessage) -> wire.Frame:
    """The frame of a message."""
    if isinstance(message, wire.Open):
        return wire.Frame(open=message)
    if isinstance(message, wire.Vocabulary):
        return wire.Frame(vocabulary=message)
    return wire.Frame(windows=message)


def link_to(
    address: str,
    hello: wire.Hello,
    mesh_key: str,
    on_lost: Callable[[MeshError], None],
    *,
    host: str = "",
    identity: Identity | None = None,
) -> Link:
    """A link to a stage, which is yet to be opened.

    Args:
        address: `host:port` of the stage.
        hello: First frame, with the protocol version.
        mesh_key: Key shared by all stages and the coordinator.
        on_lost: Called once with the reason when the stream ends without `close`.
        host: Name of the host that must answer there.
        identity: TLS identity of this process; None if both ends are in one process.
    """
    return StageLink(address, hello, mesh_key, on_lost, host=host, identity=identity)
