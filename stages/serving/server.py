"""gRPC server of one stage, with its place in a ring."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import MeshError, ProtocolError, StageFailed
from stages.serving.composition import PlugOptions, plugs_of
from stages.serving.ring_place import RingPlace
from stages.serving.sent_rows import LEAST_SENT_BYTES
from stages.serving.stage_engine import StageEngine, monotonic_us
from stages.transport.channels import HandshakeMonitor, KeyCheck, abort
from stages.transport.hidden_codec import HiddenType
from stages.transport.links import MOST_BUNDLED_WINDOWS, link_to

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    import grpc

    from stages.runtime.stage_runtime import StageRuntime
    from stages.transport.channels import Identity

log = structlog.get_logger()

Kind = TypeVar("Kind")


class StageService(rpc.StageServicer):
    """One stage: receives windows, computes them, and sends them on or verifies them.

    Runs in the event loop that made it; llama.cpp runs in the worker, mostly in its thread. `rejoin` moves it
    to another ring and keeps the loaded layers.

    Args:
        runtime: The loaded stage.
        stage_index: Its place in the pipeline.
        mesh_id: Identifier of the ring; peers of another one are refused.
        mesh_key: Key shared by all stages and the coordinator.
        hidden_type: Format of its hidden states on the wire to the next stage. Incoming rows name their own.
        identity: Returns the TLS identity for each connection to the next stage; None within one process.
        term: Term of its coordinator; a lower one is refused.
        most_sent_bytes: Most bytes of sent rows that it keeps, to send them again after a recovery.
        computes_in_loop: Whether the event loop of a stage with one thread computes short windows itself, see
            `StageWorker.compute_in_loop`; it should not where stages share one and their computing may stand
            still.
        plug_options: Options of its plugs; None for the defaults.
        on_ended: Called once with the reason when nothing can be computed any more. The coordinator's streams
            end then, and new ones are refused.

    Attributes:
        key_check: Interceptor for its server.
        handshakes: Monitor for its server's connections.
    """

    def __init__(
        self,
        runtime: StageRuntime,
        *,
        stage_index: int,
        mesh_id: str,
        mesh_key: str,
        hidden_type: HiddenType = HiddenType.F32,
        identity: Callable[[], Identity] | None = None,
        term: int = 0,
        most_sent_bytes: int = LEAST_SENT_BYTES,
        computes_in_loop: bool = True,
        plug_options: PlugOptions | None = None,
        on_ended: Callable[[MeshError], None] = lambda _reason: None,
    ) -> None:
        self.handshakes = HandshakeMonitor()
        self.key_check = KeyCheck(mesh_key, self.handshakes.called)
        self._info = runtime.info
        self._identity = identity
        self._plugs = tuple(plugs_of(runtime, identity, plug_options or PlugOptions()))
        self._engine = StageEngine(
            runtime,
            place=RingPlace(stage_index, mesh_id, mesh_key, term),
            hidden_type=hidden_type,
            most_sent_bytes=most_sent_bytes,
            computes_in_loop=computes_in_loop,
            on_verdicts=self._answer,
            on_reply=self._reply,
            on_ended=self._end,
            plugs=self._plugs,
        )
        for plug in self._plugs:
            for method, messages_for in plug.streams().items():
                setattr(self, method, self._stream_of(messages_for))
        self._on_ended = on_ended
        self._links: set[asyncio.Task[Any]] = set()
        self._verdicts: set[asyncio.Queue[wire.VerdictBundle | None]] = set()
        # Of the latest link, and the latest stream of verdicts.
        self._num_received = self._num_answered = 0
        self._controls: dict[asyncio.Queue[wire.ControlReply | None], asyncio.Task[None]] = {}
        self._idle_since_s: float | None = time.monotonic()
        self._is_closed = False

    async def connect(self, next_address: str, next_host: str = "") -> None:
        """Open the link to the next stage.

        Args:
            next_address: Its `host:port`.
            next_host: Name of the host that must answer there.

        Raises:
            HostUnreachable: Naming the address that does not answer.
            StageFailed: If the stage was closed or left its ring meanwhile.
        """
        place = self._engine.place
        link = link_to(
            next_address,
            place.hello,
            place.mesh_key,
            self._engine.next_lost,
            host=next_host,
            identity=None if self._identity is None else self._identity(),
        )
        await link.open()
        if self._is_closed or self._engine.place.mesh_id != place.mesh_id:
            await link.close()
            raise StageFailed(
                f"stage {self._engine.place.stage_index} left the ring while it was linked to {next_address}"
            )
        self._engine.next = link

    def plug_of(self, kind: type[Kind]) -> Kind | None:
        """The plug of a kind, for orders of its own; None if the stage has none."""
        return next((plug for plug in self._plugs if isinstance(plug, kind)), None)

    async def rejoin(
        self,
        stage_index: int,
        mesh_id: str,
        mesh_key: str,
        term: int,
        *,
        hidden_type: HiddenType | None = None,
    ) -> None:
        """Move to another ring; the loaded layers stay. `connect` then links it to the next stage.

        All streams of the old ring end, its peers are refused from now on, and its sessions end. Returns when
        the current batch is done: nothing of the old ring is sent after that.

        Args:
            stage_index: Its place in the new pipeline.
            mesh_id: Identifier of the new ring.
            mesh_key: Key shared by all its stages and the coordinator.
            term: Term of the calling coordinator.
            hidden_type: Format of its hidden states on the wire to the next stage; None for no change.

        Raises:
            ProtocolError: If a coordinator of a higher term took over meanwhile.
        """
        self._refuse_former(term)
        for plug in self._plugs:
            await plug.leaving()
        # Another coordinator may have taken over in that time.
        self._refuse_former(term)
        engine = self._engine
        engine.place = RingPlace(stage_index, mesh_id, mesh_key, term)
        self.key_check.replace(mesh_key)
        if hidden_type is not None:
            engine.send_as(hidden_type)
        for task in (*self._links, *self._controls.values()):
            task.cancel()
        for bundles in self._verdicts:
            bundles.put_nowait(None)
        for plug in self._plugs:
            plug.left()
        engine.close_all()
        following, engine.next = engine.next, None
        if following is not None:
            await following.close()
        await engine.drained()
        log.info("ring_joined", stage=stage_index, layers=str(self._info.layers), term=term)

    def _refuse_former(self, term: int) -> None:
        place = self._engine.place
        if term < place.term:
            raise place.stale(f"the coordinator that moves stage {place.stage_index}", term)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        rpc.add_StageServicer_to_server(self, server)

    @property
    def idle_s(self) -> float:
        """Seconds since the last coordinator disconnected; 0 while one is connected."""
        return 0.0 if self._idle_since_s is None else time.monotonic() - self._idle_since_s

    def serving(self) -> None:
        """Begin what takes long, now that its server listens."""
        self._engine.serving()

    async def close(self) -> None:
        """Stop computing and free the memory."""
        self._is_closed = True
        await self._engine.stop()

    def receive(self, frame: wire.Frame) -> None:
        """Take a frame from the stage before, whatever link has carried it.

        Raises:
            ProtocolError: If it violates the protocol.
        """
        self._num_received += 1
        if frame.HasField("windows"):
            if (count := len(frame.windows.windows)) > MOST_BUNDLED_WINDOWS:
                raise ProtocolError(
                    f"the peer sent {count} windows in one frame: at most {MOST_BUNDLED_WINDOWS} fit"
                )
            for window in frame.windows.windows:
                _require_session(window.session)
            self._engine.take(frame.windows)
        elif frame.HasField("open"):
            _require_session(frame.open.session)
            self._engine.open(frame.open)
        elif frame.HasField("vocabulary"):
            self._engine.take_vocabulary(frame.vocabulary)

    def stats(self) -> wire.StageStats:
        """Counters since the start."""
        return self._engine.stats()

    async def Link(  # noqa: N802 - the name in the .proto
        self,
        _requests: AsyncIterator[wire.Frame],
        context: grpc.aio.ServicerContext[wire.Frame, wire.Welcome],
    ) -> None:
        """Frames from upstream."""
        self.handshakes.called(context.peer())
        try:
            await self._listen(context)
        except MeshError as error:
            await self._refuse(context, error)

    async def Control(  # noqa: N802
        self,
        request_iterator: AsyncIterator[wire.ControlRequest],
        context: grpc.aio.ServicerContext[wire.ControlRequest, wire.ControlReply],
    ) -> AsyncIterator[wire.ControlReply]:
        """Out-of-band requests from the coordinator; failures and pongs back."""
        self.handshakes.called(context.peer())
        replies: asyncio.Queue[wire.ControlReply | None] = asyncio.Queue()
        try:
            first = await anext(aiter(request_iterator), None)
        except MeshError as error:
            await self._refuse(context, error)
            return
        hello = first.hello if first is not None and first.WhichOneof("kind") == "hello" else None
        welcome = wire.ControlReply(welcome=await self._greet(hello, context))
        if first is None or hello is None or not self._engine.place.is_of(hello):
            yield welcome
            return
        # Before the welcome: the coordinator's next messages may fail, and the failures must reach it.
        self._engine.accept(hello.term, hello.sender)
        for plug in self._plugs:
            plug.requested(first, replies.put_nowait)
        reader = asyncio.create_task(self._read_control(request_iterator, replies))
        reader.add_done_callback(lambda _reader: replies.put_nowait(None))
        self._controls[replies] = reader
        self._idle_since_s = None
        try:
            yield welcome
            while (reply := await replies.get()) is not None:
                yield reply
            reason: BaseException | None = self._engine.failure
            if reader.done() and not reader.cancelled():
                reason = reader.exception() or reason
            if isinstance(reason, MeshError):
                await self._refuse(context, reason)
        finally:
            reader.cancel()
            del self._controls[replies]
            if not self._controls:
                # Without a coordinator there is no recipient for failures.
                self._idle_since_s = time.monotonic()
                self._engine.close_all()

    async def Verdicts(  # noqa: N802
        self, request: wire.Hello, context: grpc.aio.ServicerContext[wire.Hello, wire.VerdictBundle]
    ) -> AsyncIterator[wire.VerdictBundle]:
        """The tail's answers, straight to the coordinator."""
        self.handshakes.called(context.peer())
        await self._greet(request, context)
        if not self._info.is_tail:
            await abort(
                context,
                ProtocolError(f"stage {self._engine.place.stage_index} is not the tail: it has no verdicts"),
            )
        await context.send_initial_metadata(())
        if not self._engine.place.is_of(request):
            return
        bundles: asyncio.Queue[wire.VerdictBundle | None] = asyncio.Queue()
        self._verdicts.add(bundles)
        self._num_answered = 0
        try:
            while (bundle := await bundles.get()) is not None:
                yield bundle
        finally:
            self._verdicts.discard(bundles)

    def _stream_of(
        self, messages_for: Callable[[Any], AsyncGenerator[Any, None]]
    ) -> Callable[[Any, grpc.aio.ServicerContext[Any, Any]], AsyncIterator[Any]]:
        """The RPC of a plug, for peers of the ring."""

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            self.handshakes.called(context.peer())
            hello = request.hello if request is not None and request.HasField("hello") else None
            await self._greet(hello, context)
            if request is None or not self._engine.place.is_of(request.hello):
                return
            try:
                messages = messages_for(request)
            except MeshError as error:
                await self._refuse(context, error)
                return
            async with contextlib.aclosing(messages):
                async for message in messages:
                    yield message

        return stream

    def _answer(self, bundle: wire.VerdictBundle) -> None:
        self._num_answered += 1
        for bundles in self._verdicts:
            bundles.put_nowait(bundle)

    def _end(self, reason: MeshError) -> None:
        """End the coordinator's streams: to it the stage is lost."""
        for replies in self._controls:
            replies.put_nowait(None)
        for bundles in self._verdicts:
            bundles.put_nowait(None)
        self._on_ended(reason)

    def _reply(self, reply: wire.ControlReply) -> None:
        for replies in self._controls:
            replies.put_nowait(reply)

    async def _greet(
        self, hello: wire.Hello | None, context: grpc.aio.ServicerContext[Any, Any]
    ) -> wire.Welcome:
        if (refusal := self._engine.place.refusal(hello) or self._engine.failure) is not None:
            await abort(context, refusal)
        return wire.Welcome(
            protocol_version=PROTOCOL_VERSION,
            software_version=SOFTWARE_VERSION,
            stage_index=self._engine.place.stage_index,
            layer_start=self._info.layers.start,
            layer_stop=self._info.layers.stop,
        )

    async def _refuse(self, context: grpc.aio.ServicerContext[Any, Any], error: MeshError) -> None:
        log.warning(
            "peer_refused", stage=self._engine.place.stage_index, peer=context.peer(), reason=error.message
        )
        await abort(context, error)

    async def _listen(self, context: grpc.aio.ServicerContext[wire.Frame, wire.Welcome]) -> None:
        """Read a Link until it ends, or this stage leaves the ring.

        Raises:
            ProtocolError: If a message violates the protocol.
        """
        first = await context.read()
        is_hello = isinstance(first, wire.Frame) and first.WhichOneof("kind") == "hello"
        hello = first.hello if is_hello else None
        await context.write(await self._greet(hello, context))
        if hello is None or not self._engine.place.is_of(hello):
            return
        reader = asyncio.create_task(self._read_link(context))
        self._links.add(reader)
        try:
            await asyncio.wait({reader})
            if not reader.cancelled():
                reader.result()
        finally:
            self._links.discard(reader)
            reader.cancel()

    async def _read_link(self, context: grpc.aio.ServicerContext[wire.Frame, wire.Welcome]) -> None:
        self._num_received = 0
        while isinstance(frame := await context.read(), wire.Frame):
            self.receive(frame)

    async def _read_control(
        self, requests: AsyncIterator[wire.ControlRequest], replies: asyncio.Queue[wire.ControlReply | None]
    ) -> None:
        async for request in requests:
            match request.WhichOneof("kind"):
                case "cancel":
                    self._engine.cancel(request.cancel.session, request.cancel.epoch)
                case "close":
                    self._engine.close(request.close)
                case "ping":
                    pong = wire.Pong(
                        sent_us=request.ping.sent_us,
                        stats=self.stats(),
                        stage_us=monotonic_us(),
                        activity=self._activity(),
                    )
                    replies.put_nowait(wire.ControlReply(pong=pong))
                case "hello":
                    pass  # the first message alone is one
                case _:
                    for plug in self._plugs:
                        plug.requested(request, replies.put_nowait)

    def _activity(self) -> wire.Activity:
        activity = self._engine.activity()
        activity.num_received = self._num_received
        if self._info.is_tail:
            activity.num_sent = self._num_answered
        return activity


def _require_session(session: int) -> None:
    """Refuse session 0: a failure of that id means the whole stage."""
    if not session:
        raise ProtocolError("the peer named session 0: ids begin at 1")
