"""gRPC's two ends with gates in between: what `gated_ring` has calls and handlers go through."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]  # missing in the stubs

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from stages.serving.server import StageService
    from tests.support.gated_ring import GatedRing
    from tests.support.gates import Stream

# Tells a handler which call it serves.
STREAM_HEADER: Final = "x-gated-stream"
# Greetings, and questions whether a stage lives.
_NOT_HELD: Final = frozenset({"hello", "welcome", "ping", "pong"})
# Comes behind all that a stage said on a stream.
_END: Final = "the end"


class GatedChannel:
    """Stands in for `grpc.aio.Channel`: its calls hold what they write.

    Args:
        ring: Whose streams they are.
        real: What carries them.
        address: Where to.
    """

    def __init__(self, ring: GatedRing, real: grpc.aio.Channel, address: str) -> None:
        self._ring = ring
        self._real = real
        self._address = address

    def stream_stream(self, path: str, **options: Any) -> Callable[..., GatedCall]:
        real = self._real.stream_stream(path, **options)
        return lambda **how: GatedCall(self._ring, self._address, path, real, None, how)

    def unary_stream(self, path: str, **options: Any) -> Callable[..., GatedCall]:
        real = self._real.unary_stream(path, **options)
        return lambda request, **how: GatedCall(self._ring, self._address, path, real, request, how)

    async def close(self, grace: float | None = None) -> None:
        with self._ring.doing():
            await self._real.close(grace)


class GatedCall:
    """The caller's end of a stream.

    Args:
        ring: Whose stream it is.
        address: Of the stage that is called.
        path: What is called there.
        make: Makes the real call.
        request: The only one, if there is but one.
        how: What else the real call is told.
    """

    def __init__(
        self, ring: GatedRing, address: str, path: str, make: Any, request: Any, how: dict[str, Any]
    ) -> None:
        self._ring = ring
        self._what = path.rsplit("/", 1)[-1]
        self._number, self.stream = ring.begin("?", address, self._what)
        self._address = address
        how = {**how, "metadata": (*how["metadata"], (STREAM_HEADER, str(self._number)))}
        if request is None:
            self._real = make(**how)
        else:
            self._name(getattr(request, "hello", request))
            self._real = make(request, **how)
        self.stream.end = self.cancel

    async def write(self, message: Any) -> None:
        stream = self.stream
        if stream.is_over:
            return
        kind = message.WhichOneof("kind")
        if kind == "hello":
            self._name(message.hello)
        if kind in _NOT_HELD:
            await self._write(message)
        else:
            stream.forth.held.append((message, lambda: self._write(message)))

    async def read(self) -> Any:
        try:
            message = await self._ring.read(self.stream.back, self._real.read())
        except BaseException:
            self._ring.over(self.stream)
            raise
        if message is EOF:
            self._ring.over(self.stream)
        return message

    async def initial_metadata(self) -> Any:
        self.stream.back.is_read = True
        try:
            with self._ring.doing():
                return await self._real.initial_metadata()
        except BaseException:
            self._ring.over(self.stream)
            raise
        finally:
            self.stream.back.is_read = False

    def __aiter__(self) -> GatedCall:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is EOF:
            raise StopAsyncIteration
        return message

    def cancel(self) -> None:
        self._real.cancel()
        self._ring.over(self.stream)

    async def code(self) -> Any:
        return await self._real.code()

    async def details(self) -> Any:
        return await self._real.details()

    async def trailing_metadata(self) -> Any:
        return await self._real.trailing_metadata()

    def _name(self, hello: wire.Hello) -> None:
        stream = self.stream
        stream.caller = hello.sender
        for gate in stream.gates:
            gate.name = gate.name.replace("?", hello.sender)

    async def _write(self, message: Any) -> None:
        self.stream.forth.num_passed += 1
        # A call that has ended takes nothing: its reader hears why.
        with self._ring.doing(), contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._real.write(message)


class GatedStage(rpc.StageServicer):
    """A stage's face towards gRPC: its service, and gates for what that says.

    Args:
        ring: Whose stage it is.
        service: The real one.
    """

    def __init__(self, ring: GatedRing, service: StageService) -> None:
        self._ring = ring
        self._service = service

    async def Link(self, requests: Any, context: Any) -> None:  # noqa: N802 - the name in the .proto
        with self._ring.serving(context) as stream:
            counted: Any = _Context(self._ring, stream, context)
            await self._service.Link(requests, counted)

    async def Control(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        with self._ring.serving(context) as stream:
            counted = _Requests(self._ring, stream, requests)
            async for reply in self._gated(stream, self._service.Control(counted, context)):
                yield reply

    async def Verdicts(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        with self._ring.serving(context) as stream:
            async for bundle in self._gated(stream, self._service.Verdicts(request, context)):
                yield bundle

    async def Follow(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        with self._ring.serving(context) as stream:
            follow: Any = self._service.Follow
            async for news in self._gated(stream, follow(request, context)):
                yield news

    async def _gated(self, stream: Stream, said: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """What the service says, each once it is let; its end comes behind all of that."""
        let: asyncio.Queue[tuple[Any] | None] = asyncio.Queue()
        gate = stream.back

        async def let_go(message: Any) -> None:
            gate.num_passed += 1
            let.put_nowait((message,))

        async def end() -> None:
            let.put_nowait(None)

        async def listen() -> None:
            async for message in said:
                if isinstance(message, wire.ControlReply) and message.WhichOneof("kind") in _NOT_HELD:
                    await let_go(message)
                else:
                    gate.held.append((message, functools.partial(let_go, message)))
            if gate.held:
                gate.held.append((_END, end))
            else:
                await end()

        listening = asyncio.create_task(listen())
        # An error takes back what was said before.
        listening.add_done_callback(
            lambda task: let.put_nowait(None) if task.cancelled() or task.exception() else None
        )
        try:
            while (one := await let.get()) is not None:
                yield one[0]
            if listening.done():
                listening.result()
        finally:
            listening.cancel()
            gate.held.clear()
            await asyncio.wait({listening})


@dataclass
class _Context:
    """A link's context, which counts what is read."""

    ring: GatedRing
    stream: Stream
    real: Any

    async def read(self) -> Any:
        return await self.ring.read(self.stream.forth, self.real.read())

    async def write(self, message: Any) -> None:
        self.stream.back.num_passed += 1
        with self.ring.doing():
            await self.real.write(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@dataclass
class _Requests:
    """A control stream's requests, counted."""

    ring: GatedRing
    stream: Stream
    real: Any

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        return await self.ring.read(self.stream.forth, anext(self.real))
