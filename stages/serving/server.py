"""gRPC server of one stage, and its place in a ring."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import MeshError, ProtocolError, ProtocolVersionMismatch, StageFailed
from stages.serving.kv_cache import LEAST_SENT_BYTES
from stages.serving.kv_replication import ReplicationSink, ReplicationSource, pause_s
from stages.serving.stage_engine import StageEngine, monotonic_us
from stages.transport.channels import HandshakeMonitor, KeyCheck, abort
from stages.transport.hidden_codec import HiddenType
from stages.transport.stage_link import MOST_BUNDLED_WINDOWS, StageLink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc

    from stages.runtime.stage_runtime import StageRuntime
    from stages.transport.channels import Identity


# A mesh id is a sha256 in hex.
_SHOWN_CHARS: Final = 64


@dataclass(frozen=True)
class RingPlace:
    """One stage's place.

    Attributes:
        stage_index: From 0, in the pipeline.
        mesh_id: Which ring it is.
        mesh_key: Shared by all stages and the coordinator of the ring.
        term: Of the coordinator that the ring is for.
    """

    stage_index: int
    mesh_id: str
    mesh_key: str
    term: int

    def is_of(self, hello: wire.Hello) -> bool:
        """Whether a peer greeted this very ring."""
        return hello.mesh_id == self.mesh_id

    def refusal(self, hello: wire.Hello | None) -> MeshError | None:
        """Why a peer is not talked to; None if it is.

        Args:
            hello: The first message of its stream; None if that was something else.
        """
        if hello is None:
            return ProtocolError("the first message of a stream must be a Hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            return ProtocolVersionMismatch(
                f"{_shown(hello.sender) or 'the peer'} speaks protocol version {hello.protocol_version} "
                f"(spanmesh {_shown(hello.software_version) or 'unknown'}), stage {self.stage_index} "
                f"speaks {PROTOCOL_VERSION} (spanmesh {SOFTWARE_VERSION}): install the same spanmesh on "
                "every host"
            )
        if not self.is_of(hello):
            return ProtocolError(
                f"this stage belongs to mesh {self.mesh_id!r}, not to {_shown(hello.mesh_id)!r}"
            )
        if hello.term < self.term:
            return self.stale(_shown(hello.sender) or "the peer", hello.term)
        return None

    def stale(self, sender: str, term: int) -> ProtocolError:
        """What a peer of a lower term is told.

        Args:
            sender: What the peer calls itself.
            term: The peer's.
        """
        return ProtocolError(
            f"{sender} is of term {term}, stage {self.stage_index} serves term {self.term}: another "
            "`mesh serve` has taken the mesh over; end the older one"
        )


def _shown(text: str) -> str:
    """What a peer says of itself, fit for one line: a status with more is not delivered at all."""
    return "".join(letter for letter in text[:_SHOWN_CHARS] if letter.isprintable())


log = structlog.get_logger()


class StageService(rpc.StageServicer):
    """One stage: takes windows from upstream, computes them, sends them on or judges them.

    Lives in the event loop that made it; llama.cpp runs in the worker's thread. `rejoin` gives it another
    place, in another ring, and leaves what is loaded as it is.

    Args:
        runtime: The loaded stage.
        stage_index: Its place in the pipeline.
        mesh_id: Which mesh it belongs to; peers of another one are refused.
        mesh_key: Shared by all stages and the coordinator.
        hidden_type: How its hidden states travel to the next stage. What arrives says its type itself.
        identity: What it shows the next stage, asked at each connection; None if that is in this process.
        term: Of the coordinator that it is for; one of a lower term is refused.
        most_sent_bytes: How much of what it sent on it keeps, to send it again after a repair.
        pause_s: How long it waits before it tells copies more, see `stages.serving.kv_replication.pause_s`.

    Attributes:
        key_check: What its server must ask first.
        handshakes: What its server must tell of connections.
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
        pause_s: Callable[[float], float] = pause_s,
    ) -> None:
        self.handshakes = HandshakeMonitor()
        self.key_check = KeyCheck(mesh_key, self.handshakes.called)
        self._info = runtime.info
        self._place = RingPlace(stage_index, mesh_id, mesh_key, term)
        self._identity = identity
        self._engine = StageEngine(
            runtime,
            stage_index=stage_index,
            hidden_type=hidden_type,
            most_sent_bytes=most_sent_bytes,
            on_verdicts=self._answer,
            on_failures=self._report,
        )
        self._links: set[asyncio.Task[Any]] = set()
        self._verdicts: set[asyncio.Queue[wire.VerdictBundle | None]] = set()
        self._replication_source = ReplicationSource(self._engine, runtime.num_slots, pause_s)
        self._replication_sink: ReplicationSink | None = None
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
        place = self._place
        hello = _hello(place.mesh_id, f"stage {place.stage_index}", place.term)
        link = StageLink(
            next_address,
            hello,
            place.mesh_key,
            self._engine.next_lost,
            host=next_host,
            identity=None if self._identity is None else self._identity(),
        )
        await link.open()
        if self._is_closed or self._place.mesh_id != place.mesh_id:
            await link.close()
            raise StageFailed(
                f"stage {self._place.stage_index} left the ring while it was linked to {next_address}"
            )
        self._engine.next = link

    async def follow(self, address: str, host: str, mesh_id: str, mesh_key: str, term: int) -> None:
        """Keep up with a stage of a ring that this one is a copy of, until it takes a place in a ring itself.

        Args:
            address: `host:port` of that stage. One that is followed already, or could not be, is left alone.
            host: Name of the host that must answer there.
            mesh_id: Which ring it is in.
            mesh_key: Of that ring.
            term: Of the coordinator that orders this.

        Raises:
            ProtocolError: If a coordinator of a higher term was here meanwhile.
        """
        if term < self._place.term:
            raise self._place.stale(f"the coordinator of the copy of stage {self._place.stage_index}", term)
        self._serve(term)
        if self._replication_sink is not None and self._replication_sink.does_for(address, mesh_id):
            return
        place = self._place
        await self._stop_replication()
        if self._place is not place or self._replication_sink is not None:
            # Another order has come in that time, and counts.
            return
        hello = _hello(mesh_id, f"a copy of stage {self._place.stage_index}", term)
        self._replication_sink = ReplicationSink(
            address,
            host,
            hello,
            mesh_key,
            None if self._identity is None else self._identity(),
            held=self._engine.held,
            take=self._engine.apply_update,
        )

    def _serve(self, term: int) -> None:
        """Be for the coordinator of this term: if it is a new one, its session ids mean other sessions."""
        if term > self._place.term:
            self._engine.close_all(forgotten=True)
            self._place = replace(self._place, term=term)

    async def _stop_replication(self) -> None:
        replication_sink, self._replication_sink = self._replication_sink, None
        if replication_sink is not None:
            await replication_sink.close()

    async def rejoin(
        self,
        stage_index: int,
        mesh_id: str,
        mesh_key: str,
        term: int,
        *,
        hidden_type: HiddenType | None = None,
    ) -> None:
        """Leave the ring for a place in another one; what is loaded stays. `connect` then links it onward.

        All streams of the old ring end, its peers are refused from now on, and its sessions are over. Returns
        when the batch that computes now is done: nothing of the old ring leaves after that.

        Args:
            stage_index: Its place in the new pipeline.
            mesh_id: Which ring it belongs to from now on.
            mesh_key: Shared by all stages of that ring and the coordinator.
            term: Of the coordinator that it is for.
            hidden_type: How its hidden states travel to the next stage; None leaves that as it was.

        Raises:
            ProtocolError: If a coordinator of a higher term was here meanwhile.
        """
        self._refuse_former(term)
        while self._replication_sink is not None:
            await self._stop_replication()
        # Another coordinator may have been here in that time.
        self._refuse_former(term)
        engine, former = self._engine, self._place
        self._place = RingPlace(stage_index, mesh_id, mesh_key, term)
        engine.stage_index = stage_index
        self.key_check.replace(mesh_key)
        if hidden_type is not None:
            engine.send_as(hidden_type)
        for task in (*self._links, *self._controls.values()):
            task.cancel()
        for bundles in self._verdicts:
            bundles.put_nowait(None)
        self._replication_source.close()
        engine.close_all(forgotten=term != former.term)
        following, engine.next = engine.next, None
        if following is not None:
            await following.close()
        await engine.drained()
        log.info("ring_joined", stage=stage_index, layers=str(self._info.layers), term=term)

    def _refuse_former(self, term: int) -> None:
        place = self._place
        if term < place.term:
            raise place.stale(f"the coordinator that moves stage {place.stage_index}", term)

    @property
    def idle_s(self) -> float:
        """For how long no coordinator was connected, in seconds; 0 while one is."""
        return 0.0 if self._idle_since_s is None else time.monotonic() - self._idle_since_s

    async def close(self) -> None:
        """Stop computing and free the memory."""
        self._is_closed = True
        await self._stop_replication()
        await self._engine.stop()

    def stats(self) -> wire.StageStats:
        """Counts since the start."""
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
        if hello is None or not self._place.is_of(hello):
            yield welcome
            return
        # Before the welcome: what the coordinator sends after it may fail, and is to be told of that.
        self._serve(hello.term)
        reader = asyncio.create_task(self._read_control(request_iterator, replies))
        reader.add_done_callback(lambda _reader: replies.put_nowait(None))
        self._controls[replies] = reader
        self._idle_since_s = None
        try:
            yield welcome
            while (reply := await replies.get()) is not None:
                yield reply
            if not reader.cancelled() and isinstance(reason := reader.exception(), MeshError):
                await self._refuse(context, reason)
        finally:
            reader.cancel()
            del self._controls[replies]
            if not self._controls:
                # No coordinator, nobody to answer.
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
                context, ProtocolError(f"stage {self._place.stage_index} is not the tail: it has no verdicts")
            )
        await context.send_initial_metadata(())
        if not self._place.is_of(request):
            return
        bundles: asyncio.Queue[wire.VerdictBundle | None] = asyncio.Queue()
        self._verdicts.add(bundles)
        try:
            while (bundle := await bundles.get()) is not None:
                yield bundle
        finally:
            self._verdicts.discard(bundles)

    async def Follow(  # noqa: N802
        self,
        request: wire.FollowRequest,
        context: grpc.aio.ServicerContext[wire.FollowRequest, wire.SlotRows],
    ) -> AsyncIterator[wire.SlotRows]:
        """What the sessions here have in the KV cache, to a copy of this stage."""
        self.handshakes.called(context.peer())
        hello = request.hello if request is not None and request.HasField("hello") else None
        await self._greet(hello, context)
        if request is None or not self._place.is_of(request.hello):
            return
        if (refusal := self._replication_source.refusal(request)) is not None:
            await self._refuse(context, refusal)
        async with contextlib.aclosing(self._replication_source.updates(request)) as updates:
            async for update in updates:
                yield update

    def _answer(self, verdicts: list[wire.Verdict]) -> None:
        for bundles in self._verdicts:
            bundles.put_nowait(wire.VerdictBundle(verdicts=verdicts))

    def _report(self, failures: list[wire.Failure]) -> None:
        for failure in failures:
            for replies in self._controls:
                replies.put_nowait(wire.ControlReply(failure=failure))

    async def _greet(
        self, hello: wire.Hello | None, context: grpc.aio.ServicerContext[Any, Any]
    ) -> wire.Welcome:
        if (refusal := self._place.refusal(hello)) is not None:
            await abort(context, refusal)
        return wire.Welcome(
            protocol_version=PROTOCOL_VERSION,
            software_version=SOFTWARE_VERSION,
            stage_index=self._place.stage_index,
            layer_start=self._info.layers.start,
            layer_stop=self._info.layers.stop,
        )

    async def _refuse(self, context: grpc.aio.ServicerContext[Any, Any], error: MeshError) -> None:
        log.warning("peer_refused", stage=self._place.stage_index, peer=context.peer(), reason=error.message)
        await abort(context, error)

    async def _listen(self, context: grpc.aio.ServicerContext[wire.Frame, wire.Welcome]) -> None:
        """A Link until it ends, or this stage leaves the ring.

        Raises:
            ProtocolError: If the peer sends what no peer of the mesh sends.
        """
        first = await context.read()
        is_hello = isinstance(first, wire.Frame) and first.WhichOneof("kind") == "hello"
        hello = first.hello if is_hello else None
        await context.write(await self._greet(hello, context))
        if hello is None or not self._place.is_of(hello):
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
        while isinstance(frame := await context.read(), wire.Frame):
            if frame.HasField("windows"):
                if (count := len(frame.windows.windows)) > MOST_BUNDLED_WINDOWS:
                    raise ProtocolError(
                        f"the peer sent {count} windows in one frame: at most {MOST_BUNDLED_WINDOWS} fit"
                    )
                for window in frame.windows.windows:
                    _require_session(window.session)
                    self._engine.take(window)
            elif frame.HasField("open"):
                _require_session(frame.open.session)
                self._engine.open(frame.open)
            elif frame.HasField("vocabulary"):
                self._engine.take_vocabulary(frame.vocabulary)

    async def _read_control(
        self, requests: AsyncIterator[wire.ControlRequest], replies: asyncio.Queue[wire.ControlReply | None]
    ) -> None:
        async for request in requests:
            match request.WhichOneof("kind"):
                case "cancel":
                    self._engine.cancel(request.cancel.session, request.cancel.epoch)
                case "close":
                    self._engine.close(request.close.session)
                case "ping":
                    pong = wire.Pong(
                        sent_us=request.ping.sent_us, stats=self.stats(), stage_us=monotonic_us()
                    )
                    replies.put_nowait(wire.ControlReply(pong=pong))


def _hello(mesh_id: str, sender: str, term: int) -> wire.Hello:
    return wire.Hello(
        protocol_version=PROTOCOL_VERSION,
        software_version=SOFTWARE_VERSION,
        mesh_id=mesh_id,
        sender=sender,
        term=term,
    )


def _require_session(session: int) -> None:
    """A failure of session 0 means the whole stage: no window may bring that about."""
    if not session:
        raise ProtocolError("the peer named session 0: ids begin at 1")
