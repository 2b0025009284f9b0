"""gRPC server of one stage, with its place in a ring."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import MeshError, ProtocolError, ProtocolVersionMismatch, StageFailed
from stages.runtime.process_memory import free_memory_bytes
from stages.serving.feature_outlet import FeatureOutlet
from stages.serving.kv_disk import KvDisk
from stages.serving.kv_replication import ReplicationSink, ReplicationSource, pause_s
from stages.serving.sent_rows import LEAST_SENT_BYTES
from stages.serving.slot_copies import copy_of
from stages.serving.slot_replication import SlotReplication
from stages.serving.stage_engine import StageEngine, monotonic_us
from stages.transport.channels import HandshakeMonitor, KeyCheck, abort
from stages.transport.frames import MOST_BUNDLED_WINDOWS
from stages.transport.hidden_codec import HiddenType
from stages.transport.links import link_to

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection
    from concurrent.futures import Executor

    import grpc

    from stages.runtime.stage_runtime import StageRuntime
    from stages.serving.block_store import BlockStore
    from stages.serving.prefix_blocks import SlotCopy
    from stages.transport.channels import Identity

# Length of a mesh id: a sha256 in hex.
_SHOWN_CHARS: Final = 64

log = structlog.get_logger()


@dataclass(frozen=True)
class RingPlace:
    """Place of a stage in a ring."""

    stage_index: int
    """Place in the pipeline, from 0."""
    mesh_id: str
    """Identifier of the ring."""
    mesh_key: str
    """Key shared by all stages and the coordinator."""
    term: int
    """Term of the ring's coordinator."""

    def is_of(self, hello: wire.Hello) -> bool:
        """Whether a hello is for this ring."""
        return hello.mesh_id == self.mesh_id

    def refusal(self, hello: wire.Hello | None) -> MeshError | None:
        """The error for a peer of another ring, version or lower term; None if it fits.

        Args:
            hello: First message of its stream; None if that was something else.
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
        """The error for a peer of a lower term.

        Args:
            sender: The peer's name.
            term: The peer's.
        """
        return ProtocolError(
            f"{sender} is of term {term}, stage {self.stage_index} serves term {self.term}: another "
            "`mesh serve` has taken over the mesh; stop the older one"
        )


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
        pause_s: Pause between updates of replicas, see `stages.serving.kv_replication.pause_s`.
        computes_in_loop: Whether the event loop of a stage with one thread computes short windows itself, see
            `StageWorker.compute_in_loop`; it should not where stages share one and their computing may stand
            still.
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
        pause_s: Callable[[float], float] = pause_s,
        computes_in_loop: bool = True,
        on_ended: Callable[[MeshError], None] = lambda _reason: None,
    ) -> None:
        self.handshakes = HandshakeMonitor()
        self.key_check = KeyCheck(mesh_key, self.handshakes.called)
        self._info = runtime.info
        self._place = RingPlace(stage_index, mesh_id, mesh_key, term)
        self._identity = identity
        self._features = FeatureOutlet(runtime)
        self._engine = StageEngine(
            runtime,
            stage_index=stage_index,
            hidden_type=hidden_type,
            most_sent_bytes=most_sent_bytes,
            computes_in_loop=computes_in_loop,
            on_verdicts=self._answer,
            on_failures=self._report,
            on_ended=self._end,
            plugs=[self._features],
        )
        self._on_ended = on_ended
        self._links: set[asyncio.Task[Any]] = set()
        self._verdicts: set[asyncio.Queue[wire.VerdictBundle | None]] = set()
        # Of the latest link, and the latest stream of verdicts.
        self._num_received = self._num_answered = 0
        self._rows = SlotReplication(self._engine.slots)
        self._replication_source = ReplicationSource(self._engine, self._rows, runtime.num_slots, pause_s)
        self._disk: KvDisk | None = None
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
        link = link_to(
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
        """Follow a stage of a ring as its replica, until it joins a ring itself.

        Args:
            address: `host:port` of that stage. No effect if it is followed already, or could not be.
            host: Name of the host that must answer there.
            mesh_id: Identifier of its ring.
            mesh_key: Key of that ring.
            term: Term of the calling coordinator.

        Raises:
            ProtocolError: If a coordinator of a higher term took over meanwhile.
        """
        if term < self._place.term:
            raise self._place.stale(
                f"the coordinator of the replica of stage {self._place.stage_index}", term
            )
        self._serve(term)
        if self._replication_sink is not None and self._replication_sink.does_for(address, mesh_id):
            return
        place = self._place
        await self._stop_replication()
        if self._place is not place or self._replication_sink is not None:
            # A later call came in that time, and counts.
            return
        hello = _hello(mesh_id, f"a replica of stage {self._place.stage_index}", term)
        self._replication_sink = ReplicationSink(
            address,
            host,
            hello,
            mesh_key,
            None if self._identity is None else self._identity(),
            held=lambda: self._engine.in_worker(self._rows.held),
            take=self._apply_update,
        )

    async def _apply_update(self, update: wire.SlotRows) -> None:
        # If this replica becomes a stage meanwhile, the rows count: their tokens are compared.
        self._engine.sessions.adopt(update.slot, update.session)
        await self._engine.in_worker(lambda: self._rows.apply_update(update))

    def _serve(self, term: int) -> None:
        """Accept a coordinator's term: sessions of the former coordinator end."""
        if term > self._place.term:
            self._engine.close_all()
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
        while self._replication_sink is not None:
            await self._stop_replication()
        # Another coordinator may have taken over in that time.
        self._refuse_former(term)
        engine = self._engine
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
        self._features.close()
        engine.close_all()
        following, engine.next = engine.next, None
        if following is not None:
            await following.close()
        await engine.drained()
        log.info("ring_joined", stage=stage_index, layers=str(self._info.layers), term=term)

    def _refuse_former(self, term: int) -> None:
        place = self._place
        if term < place.term:
            raise place.stale(f"the coordinator that moves stage {place.stage_index}", term)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        rpc.add_StageServicer_to_server(self, server)

    @property
    def idle_s(self) -> float:
        """Seconds since the last coordinator disconnected; 0 while one is connected."""
        return 0.0 if self._idle_since_s is None else time.monotonic() - self._idle_since_s

    async def close(self) -> None:
        """Stop computing and free the memory."""
        self._is_closed = True
        await self._stop_replication()
        await self._engine.stop()

    async def keep_blocks(
        self, store: BlockStore, *, writer: Executor | None = None, reader: Executor | None = None
    ) -> None:
        """Keep blocks of KV rows on disk from now on, until `close`.

        Args:
            store: The block files.
            writer: Executor with one thread, for writing; a new one unless given.
            reader: Executor with one thread, for reading; likewise.

        Raises:
            OSError: If the folders cannot be made or read.
        """
        disk = KvDisk(
            store,
            self._copy_slot,
            writer=writer or ThreadPoolExecutor(1, "kv-writer"),
            reader=reader or ThreadPoolExecutor(1, "kv-reader"),
            clock_ns=time.time_ns,
            free_memory_bytes=free_memory_bytes,
            on_news=self._tell_blocks,
        )
        try:
            await disk.open()
        except BaseException:
            await disk.stop()
            raise
        if self._is_closed:
            await disk.stop()
            return
        self._disk = disk
        self._engine.plug(disk)
        for news in disk.news():
            self._tell_blocks(news)

    def _copy_slot(
        self,
        slot: int,
        num_positions: int,
        tokens_sha256: bytes,
        state_positions: Collection[int],
        most_bytes: Callable[[], int],
    ) -> asyncio.Future[SlotCopy | None]:
        def copy() -> SlotCopy | None:
            return copy_of(
                self._engine.slots,
                slot,
                num_positions,
                tokens_sha256=tokens_sha256,
                state_positions=state_positions,
                most_bytes=most_bytes(),
            )

        return self._engine.in_worker(copy)

    def _tell_blocks(self, news: wire.BlockNews) -> None:
        for replies in self._controls:
            replies.put_nowait(wire.ControlReply(block_news=news))

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
        if hello is None or not self._place.is_of(hello):
            yield welcome
            return
        # Before the welcome: the coordinator's next messages may fail, and the failures must reach it.
        self._serve(hello.term)
        if self._disk is not None:
            for news in self._disk.news():
                replies.put_nowait(wire.ControlReply(block_news=news))
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
                context, ProtocolError(f"stage {self._place.stage_index} is not the tail: it has no verdicts")
            )
        await context.send_initial_metadata(())
        if not self._place.is_of(request):
            return
        bundles: asyncio.Queue[wire.VerdictBundle | None] = asyncio.Queue()
        self._verdicts.add(bundles)
        self._num_answered = 0
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
        """KV rows of the sessions here, for a replica of this stage."""
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

    async def Features(  # noqa: N802
        self,
        request: wire.FeatureRequest,
        context: grpc.aio.ServicerContext[wire.FeatureRequest, wire.FeatureBundle],
    ) -> AsyncIterator[wire.FeatureBundle]:
        """Features of windows that ask for them, for the coordinator's drafter. One stream at a time."""
        self.handshakes.called(context.peer())
        hello = request.hello if request is not None and request.HasField("hello") else None
        await self._greet(hello, context)
        if request is None or not self._place.is_of(request.hello):
            return
        if (refusal := self._features.refusal(request)) is not None:
            await self._refuse(context, refusal)
        async with contextlib.aclosing(self._features.bundles(request)) as bundles:
            async for bundle in bundles:
                yield bundle

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

    def _report(self, failures: list[wire.Failure]) -> None:
        for failure in failures:
            for replies in self._controls:
                replies.put_nowait(wire.ControlReply(failure=failure))

    async def _greet(
        self, hello: wire.Hello | None, context: grpc.aio.ServicerContext[Any, Any]
    ) -> wire.Welcome:
        if (refusal := self._place.refusal(hello) or self._engine.failure) is not None:
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
        """Read a Link until it ends, or this stage leaves the ring.

        Raises:
            ProtocolError: If a message violates the protocol.
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
        self._num_received = 0
        while isinstance(frame := await context.read(), wire.Frame):
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

    async def _read_control(
        self, requests: AsyncIterator[wire.ControlRequest], replies: asyncio.Queue[wire.ControlReply | None]
    ) -> None:
        async for request in requests:
            match request.WhichOneof("kind"):
                case "cancel":
                    self._engine.cancel(request.cancel.session, request.cancel.epoch)
                case "close":
                    self._engine.close(request.close)
                case "fetch":
                    self._fetch(request.fetch, replies)
                case "ping":
                    pong = wire.Pong(
                        sent_us=request.ping.sent_us,
                        stats=self.stats(),
                        stage_us=monotonic_us(),
                        activity=self._activity(),
                    )
                    replies.put_nowait(wire.ControlReply(pong=pong))

    def _activity(self) -> wire.Activity:
        activity = self._engine.activity()
        activity.num_received = self._num_received
        if self._info.is_tail:
            activity.num_sent = self._num_answered
        return activity

    def _fetch(self, message: wire.Fetch, replies: asyncio.Queue[wire.ControlReply | None]) -> None:
        def reply(fetched: wire.Fetched) -> None:
            replies.put_nowait(wire.ControlReply(fetched=fetched))

        if self._disk is None:
            reply(wire.Fetched(id=message.id))
        else:
            self._disk.fetch(message, reply)


def _shown(text: str) -> str:
    """Text of a peer, shortened to one line: gRPC does not deliver a status with more."""
    return "".join(letter for letter in text[:_SHOWN_CHARS] if letter.isprintable())


def _hello(mesh_id: str, sender: str, term: int) -> wire.Hello:
    return wire.Hello(
        protocol_version=PROTOCOL_VERSION,
        software_version=SOFTWARE_VERSION,
        mesh_id=mesh_id,
        sender=sender,
        term=term,
    )


def _require_session(session: int) -> None:
    """Refuse session 0: a failure of that id means the whole stage."""
    if not session:
        raise ProtocolError("the peer named session 0: ids begin at 1")
