"""The gRPC face of one stage."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import structlog

from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import (
    InvalidWindow,
    MeshError,
    ProtocolError,
    ProtocolVersionMismatch,
    StageFailed,
    wire_of,
)
from stages.channels import KeyCheck, abort
from stages.encoded_hidden import EncodedHidden
from stages.grammar import Grammars
from stages.hidden_codec import HiddenType
from stages.judge import Judge
from stages.link import MOST_BUNDLED_WINDOWS, StageLink
from stages.opening import Opening
from stages.resident_memory import resident_bytes
from stages.runtime import Span, StageRuntime
from stages.sent_rows import LEAST_SENT_BYTES, SentRows
from stages.sessions import SessionTable
from stages.strangers import Strangers
from stages.wakefulness import Wakefulness
from stages.window_queue import Begun, Passed, QueuedWindow, WindowQueue
from stages.worker import StageWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc

    from stages.identity import Identity

log = structlog.get_logger()

# A coordinator has a few dozen windows of a session under way: whoever sends so many ahead means no good.
_MOST_QUEUED_PER_SLOT: Final = 512
# A mesh id is a sha256 in hex.
_SHOWN_CHARS: Final = 64


def monotonic_us() -> int:
    """Microseconds of this host's monotonic clock."""
    return time.monotonic_ns() // 1000


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

    Attributes:
        key_check: What its server must ask first.
        strangers: What its server must tell of connections.
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
    ) -> None:
        self.strangers = Strangers()
        self.key_check = KeyCheck(mesh_key, self.strangers.called)
        self._loop = asyncio.get_running_loop()
        self._info = runtime.info
        self._max_rows = runtime.max_rows
        self._most_queued = _MOST_QUEUED_PER_SLOT * runtime.num_slots
        self._stage_index = stage_index
        self._mesh_id = mesh_id
        self._mesh_key = mesh_key
        self._identity = identity
        self._term = term
        self._sessions = SessionTable(runtime.num_slots)
        self._grammars = Grammars(runtime.info.n_vocab)
        self._queue = WindowQueue(runtime.max_rows, self._sessions.is_live, takes_runs=runtime.computes_runs)
        self._worker = StageWorker(
            runtime,
            self._queue,
            clock_us=monotonic_us,
            hidden_type=hidden_type,
            sent=SentRows(runtime.num_slots, most_sent_bytes),
            on_windows=self._from_worker(self._send_on),
            on_verdicts=self._from_worker(self._answer),
            on_failures=self._from_worker(self._report),
        )
        self._wakefulness = Wakefulness()
        self._next: StageLink | None = None
        self._links: set[asyncio.Task[Any]] = set()
        self._verdicts: set[asyncio.Queue[wire.VerdictBundle | None]] = set()
        self._controls: dict[asyncio.Queue[wire.ControlReply | None], asyncio.Task[None]] = {}
        self._idle_since_s: float | None = time.monotonic()
        self._is_closed = False
        self._worker.start()

    async def connect(self, next_address: str, next_host: str = "") -> None:
        """Open the link to the next stage.

        Args:
            next_address: Its `host:port`.
            next_host: Name of the host that must answer there.

        Raises:
            HostUnreachable: Naming the address that does not answer.
            StageFailed: If the stage was closed or left its ring meanwhile.
        """
        mesh_id = self._mesh_id
        hello = wire.Hello(
            protocol_version=PROTOCOL_VERSION,
            software_version=SOFTWARE_VERSION,
            mesh_id=self._mesh_id,
            sender=f"stage {self._stage_index}",
            term=self._term,
        )
        link = StageLink(
            next_address,
            hello,
            self._mesh_key,
            self._on_next_lost,
            host=next_host,
            identity=None if self._identity is None else self._identity(),
        )
        await link.open()
        if self._is_closed or self._mesh_id != mesh_id:
            await link.close()
            raise StageFailed(
                f"stage {self._stage_index} left the ring while it was linked to {next_address}"
            )
        self._next = link

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
        if term < self._term:
            raise self._stale(f"the coordinator that moves stage {self._stage_index}", term)
        is_same_coordinator = term == self._term
        self._stage_index, self._mesh_id, self._mesh_key, self._term = stage_index, mesh_id, mesh_key, term
        self.key_check.replace(mesh_key)
        if hidden_type is not None:
            self._worker.send_as(hidden_type)
        for task in (*self._links, *self._controls.values()):
            task.cancel()
        for bundles in self._verdicts:
            bundles.put_nowait(None)
        self._end_sessions()
        if not is_same_coordinator:
            self._sessions.forget()
        following, self._next = self._next, None
        if following is not None:
            await following.close()
        passed = asyncio.Event()
        self._queue.change(Passed(lambda: self._loop.call_soon_threadsafe(passed.set)))
        await passed.wait()
        log.info("ring_joined", stage=stage_index, layers=str(self._info.layers), term=term)

    @property
    def idle_s(self) -> float:
        """For how long no coordinator was connected, in seconds; 0 while one is."""
        return 0.0 if self._idle_since_s is None else time.monotonic() - self._idle_since_s

    async def close(self) -> None:
        """Stop computing and free the memory."""
        self._is_closed = True
        if self._next is not None:
            await self._next.close()
        self._queue.close()
        self._wakefulness.update(0)
        await asyncio.to_thread(self._worker.join)

    def stats(self) -> wire.StageStats:
        """Counts since the start."""
        counts = self._worker.counts
        return wire.StageStats(
            num_windows=counts.num_windows,
            num_rows=counts.num_rows,
            num_decodes=counts.num_decodes,
            compute_us=counts.compute_us,
            num_dropped_windows=self._queue.num_dropped,
            num_queued_windows=len(self._queue),
            num_open_sessions=len(self._sessions),
            num_sent_bytes=0 if self._next is None else self._next.num_sent_bytes,
            resident_bytes=resident_bytes(),
        )

    async def Link(  # noqa: N802 - the name in the .proto
        self,
        _requests: AsyncIterator[wire.Frame],
        context: grpc.aio.ServicerContext[wire.Frame, wire.Welcome],
    ) -> None:
        """Frames from upstream."""
        self.strangers.called(context.peer())
        try:
            await self._listen(context)
        except MeshError as error:
            await self._blame(context, error)

    async def Control(  # noqa: N802
        self,
        request_iterator: AsyncIterator[wire.ControlRequest],
        context: grpc.aio.ServicerContext[wire.ControlRequest, wire.ControlReply],
    ) -> AsyncIterator[wire.ControlReply]:
        """Out-of-band requests from the coordinator; failures and pongs back."""
        self.strangers.called(context.peer())
        replies: asyncio.Queue[wire.ControlReply | None] = asyncio.Queue()
        try:
            first = await anext(aiter(request_iterator), None)
        except MeshError as error:
            await self._blame(context, error)
            return
        hello = first.hello if first is not None and first.WhichOneof("kind") == "hello" else None
        yield wire.ControlReply(welcome=await self._greet(hello, context))
        if hello is None or not self._is_here(hello):
            return
        self._term = max(self._term, hello.term)
        reader = asyncio.create_task(self._read_control(request_iterator, replies))
        reader.add_done_callback(lambda _reader: replies.put_nowait(None))
        self._controls[replies] = reader
        self._idle_since_s = None
        try:
            while (reply := await replies.get()) is not None:
                yield reply
            if not reader.cancelled() and isinstance(reason := reader.exception(), MeshError):
                await self._blame(context, reason)
        finally:
            reader.cancel()
            del self._controls[replies]
            if not self._controls:
                # No coordinator, nobody to answer.
                self._idle_since_s = time.monotonic()
                self._end_sessions()

    async def Verdicts(  # noqa: N802
        self, request: wire.Hello, context: grpc.aio.ServicerContext[wire.Hello, wire.VerdictBundle]
    ) -> AsyncIterator[wire.VerdictBundle]:
        """The tail's answers, straight to the coordinator."""
        self.strangers.called(context.peer())
        await self._greet(request, context)
        if not self._info.is_tail:
            await abort(
                context, ProtocolError(f"stage {self._stage_index} is not the tail: it has no verdicts")
            )
        await context.send_initial_metadata(())
        if not self._is_here(request):
            return
        bundles: asyncio.Queue[wire.VerdictBundle | None] = asyncio.Queue()
        self._verdicts.add(bundles)
        try:
            while (bundle := await bundles.get()) is not None:
                yield bundle
        finally:
            self._verdicts.discard(bundles)

    async def _greet(
        self, hello: wire.Hello | None, context: grpc.aio.ServicerContext[Any, Any]
    ) -> wire.Welcome:
        if hello is None:
            await abort(context, ProtocolError("the first message of a stream must be a Hello"))
        elif hello.protocol_version != PROTOCOL_VERSION:
            await abort(
                context,
                ProtocolVersionMismatch(
                    f"{_shown(hello.sender) or 'the peer'} speaks protocol version {hello.protocol_version} "
                    f"(spanmesh {_shown(hello.software_version) or 'unknown'}), stage {self._stage_index} "
                    f"speaks {PROTOCOL_VERSION} (spanmesh {SOFTWARE_VERSION}): install the same spanmesh on "
                    "every host"
                ),
            )
        elif hello.mesh_id != self._mesh_id:
            await abort(
                context,
                ProtocolError(
                    f"this stage belongs to mesh {self._mesh_id!r}, not to {_shown(hello.mesh_id)!r}"
                ),
            )
        elif hello.term < self._term:
            await abort(context, self._stale(_shown(hello.sender) or "the peer", hello.term))
        return wire.Welcome(
            protocol_version=PROTOCOL_VERSION,
            software_version=SOFTWARE_VERSION,
            stage_index=self._stage_index,
            layer_start=self._info.layers.start,
            layer_stop=self._info.layers.stop,
        )

    async def _blame(self, context: grpc.aio.ServicerContext[Any, Any], error: MeshError) -> None:
        log.warning("peer_refused", stage=self._stage_index, peer=context.peer(), reason=error.message)
        await abort(context, error)

    def _stale(self, sender: str, term: int) -> ProtocolError:
        return ProtocolError(
            f"{sender} is of term {term}, stage {self._stage_index} serves term {self._term}: another "
            "`mesh serve` has taken the mesh over; end the older one"
        )

    def _is_here(self, hello: wire.Hello) -> bool:
        """Whether this stage is still in the ring that it greeted a peer of."""
        return hello.mesh_id == self._mesh_id

    def _end_sessions(self) -> None:
        self._sessions.close_all()
        self._wakefulness.update(0)

    async def _listen(self, context: grpc.aio.ServicerContext[wire.Frame, wire.Welcome]) -> None:
        """A Link until it ends, or this stage leaves the ring.

        Raises:
            ProtocolError: If the peer sends what no peer of the mesh sends.
        """
        first = await context.read()
        is_hello = isinstance(first, wire.Frame) and first.WhichOneof("kind") == "hello"
        hello = first.hello if is_hello else None
        await context.write(await self._greet(hello, context))
        if hello is None or not self._is_here(hello):
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
                    self._on_window(window)
            elif frame.HasField("open"):
                _require_session(frame.open.session)
                self._on_open(frame.open)
            elif frame.HasField("vocabulary"):
                if self._info.is_tail:
                    self._grammars.take(frame.vocabulary)
                elif self._next is not None:
                    self._next.send(frame.vocabulary)

    async def _read_control(
        self, requests: AsyncIterator[wire.ControlRequest], replies: asyncio.Queue[wire.ControlReply | None]
    ) -> None:
        async for request in requests:
            match request.WhichOneof("kind"):
                case "cancel":
                    self._sessions.cancel(request.cancel.session, request.cancel.epoch)
                case "close":
                    self._sessions.close(request.close.session)
                    self._wakefulness.update(len(self._sessions))
                case "ping":
                    pong = wire.Pong(
                        sent_us=request.ping.sent_us, stats=self.stats(), stage_us=monotonic_us()
                    )
                    replies.put_nowait(wire.ControlReply(pong=pong))

    def _on_open(self, message: wire.Open) -> None:
        try:
            opening = Opening.from_wire(message)
            if self._info.is_tail:
                opening.require_vocabulary(self._info.n_vocab)
            judge = Judge.of(opening, self._grammars)
            session = self._sessions.open(opening.session, opening.slot, judge, opening.resumed)
            # What cannot go back to a position cannot go on from one before its end either.
            num_resumed = session.num_resumed if self._info.can_trim else 0
            self._queue.change(
                Begun(session.id, opening.source_slot, session.slot, len(opening.cached), num_resumed)
            )
            # Not before the windows that bring what a later stage is to copy.
            self._queue.change(Passed(lambda: self._loop.call_soon_threadsafe(self._pass_on, message)))
        except MeshError as error:
            self._report([_failure(message.session, 0, 0, error)])
        self._wakefulness.update(len(self._sessions))

    def _pass_on(self, message: wire.Open) -> None:
        if self._next is not None and self._sessions.is_open(message.session):
            self._next.send(message)

    def _on_window(self, window: wire.Window) -> None:
        try:
            session = self._sessions.admit(window.session, window.epoch)
            if session is None:
                self._queue.num_dropped += 1
                return
            if len(window.tokens) > self._max_rows:
                # It would wait for ever: no batch has room for it.
                raise InvalidWindow(
                    f"a window has {len(window.tokens)} rows; this stage takes {self._max_rows}"
                )
            if len(self._queue) >= self._most_queued:
                raise InvalidWindow(f"{self._most_queued} windows wait at this stage: it takes no more")
            span = Span(session.slot, window.start, list(window.tokens), num_outputs=window.verify_rows)
            hidden = None if self._info.is_first else EncodedHidden.of_window(window, self._info.n_embd)
        except MeshError as error:
            self._report([_failure(window.session, window.epoch, window.id, error)])
            return
        self._queue.put(
            QueuedWindow(
                session=window.session,
                epoch=window.epoch,
                id=window.id,
                span=span,
                hidden=hidden,
                judge=session.judge,
                times=tuple(window.times),
                arrived_us=monotonic_us(),
                most_together=window.most_together,
                num_resumed=session.num_resumed if self._info.can_trim else 0,
            )
        )

    def _from_worker(self, handler: Any) -> Any:
        """A function for the worker's thread that runs `handler` in the event loop."""
        return lambda messages: self._loop.call_soon_threadsafe(handler, messages)

    def _send_on(self, windows: list[wire.Window]) -> None:
        for window in windows:
            if not self._sessions.is_live(window.session, window.epoch):
                self._queue.num_dropped += 1
            elif self._next is None:
                error = StageFailed(f"stage {self._stage_index} has no link to the next stage")
                self._report([_failure(window.session, window.epoch, window.id, error)])
            else:
                self._next.send(window)

    def _answer(self, verdicts: list[wire.Verdict]) -> None:
        live = [verdict for verdict in verdicts if self._sessions.is_live(verdict.session, verdict.epoch)]
        if live:
            for queue in self._verdicts:
                queue.put_nowait(wire.VerdictBundle(verdicts=live))

    def _report(self, failures: list[wire.Failure]) -> None:
        for failure in failures:
            log.warning(
                "window_failed", stage=self._stage_index, session=failure.session, reason=failure.message
            )
            for queue in self._controls:
                queue.put_nowait(wire.ControlReply(failure=failure))

    def _on_next_lost(self, error: MeshError) -> None:
        log.error("link_lost", stage=self._stage_index, reason=error.message)
        self._next = None
        self._report([_failure(0, 0, 0, error)])


def _shown(text: str) -> str:
    """What a peer says of itself, fit for one line: a status with more is not delivered at all."""
    return "".join(letter for letter in text[:_SHOWN_CHARS] if letter.isprintable())


def _require_session(session: int) -> None:
    """A failure of session 0 means the whole stage: no window may bring that about."""
    if not session:
        raise ProtocolError("the peer named session 0: ids begin at 1")


def _failure(session: int, epoch: int, window_id: int, error: MeshError) -> wire.Failure:
    return wire.Failure(
        session=session, epoch=epoch, window_id=window_id, code=wire_of(error).code, message=error.message
    )
