"""Stage engine: path of windows from the streams through the worker to the next stage."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import InvalidWindow, MeshError, StageFailed, wire_of
from stages.cancellable_work import in_own_thread
from stages.grammar.session_grammar import Grammars
from stages.host.cpu_latency import CpuLatencyRequest
from stages.runtime.process_memory import resident_bytes
from stages.runtime.spans import Span
from stages.sampling.session_spec import SessionSpec
from stages.sampling.verifier import WindowVerifier
from stages.serving.scheduler import QueueBarrier, QueuedWindow, SlotAssigned, WindowScheduler
from stages.serving.sessions import SessionTable
from stages.serving.slots import KvSlots
from stages.serving.worker import StageWorker
from stages.transport.hidden_codec import EncodedHidden

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from stages.runtime.stage_runtime import StageRuntime
    from stages.serving.plugs import StagePlug
    from stages.serving.ring_place import RingPlace
    from stages.serving.sessions import StageSession
    from stages.transport.hidden_codec import HiddenType
    from stages.transport.links import Link

# A coordinator has a few dozen windows of a session in flight; more than this violates the protocol.
_MOST_QUEUED_PER_SLOT: Final = 512

log = structlog.get_logger()

Result = TypeVar("Result")


class StageEngine:
    """Sessions, scheduler and worker of one stage, in the event loop that made it.

    Args:
        runtime: The loaded stage; the worker owns it.
        place: Its place in a ring.
        hidden_type: Format of its hidden states on the wire to the next stage.
        most_sent_bytes: Most bytes of sent rows that it keeps, to send them again after a recovery.
        computes_in_loop: Whether the event loop may compute short windows itself.
        on_verdicts: Called with verdicts of live sessions.
        on_reply: Called with replies for all connected coordinators; a failure of session 0 means the whole
            stage.
        on_ended: Called once with the reason when nothing can be computed any more.
        plugs: What takes part in its batches beside the core.

    Attributes:
        place: As given; another one after `accept`, and in another ring.
        next: The link to the next stage, while there is one.
        sessions: Sessions that are open.
        slots: KV cache of the stage, for functions in the computing thread.
        failure: Why nothing is computed any more; None while the stage works.
    """

    def __init__(
        self,
        runtime: StageRuntime,
        *,
        place: RingPlace,
        hidden_type: HiddenType,
        most_sent_bytes: int,
        computes_in_loop: bool,
        on_verdicts: Callable[[wire.VerdictBundle], None],
        on_reply: Callable[[wire.ControlReply], None],
        on_ended: Callable[[MeshError], None],
        plugs: Sequence[StagePlug] = (),
    ) -> None:
        self.place = place
        self._plugs = plugs
        self.next: Link | None = None
        self.failure: MeshError | None = None
        self._on_ended = on_ended
        # What others wait for the computing thread to do.
        self._asked: set[asyncio.Future[Any]] = set()
        self._loop = asyncio.get_running_loop()
        self._info = runtime.info
        self._most_rows = runtime.most_rows
        self._most_queued = _MOST_QUEUED_PER_SLOT * runtime.num_slots
        self._on_verdicts = on_verdicts
        self._on_reply = on_reply
        self.sessions = SessionTable(runtime.num_slots)
        self._grammars = Grammars(runtime.info.n_vocab)
        self._scheduler = WindowScheduler(
            runtime.max_rows,
            self.sessions.is_live,
            run_of=runtime.run_around if runtime.computes_runs else None,
        )
        self.slots = KvSlots(runtime, most_sent_bytes)
        self._num_bundles = 0
        # libgomp has threads for each thread that computes: with two such they would be more than the
        # processors, and wait for one another by sleeping.
        self._computes_in_loop = computes_in_loop and runtime.num_threads == 1
        self._worker = StageWorker(
            runtime,
            self._scheduler,
            clock_us=monotonic_us,
            hidden_type=hidden_type,
            slots=self.slots,
            on_windows=self.from_worker(self._send_on),
            on_verdicts=self.from_worker(self._answer),
            on_failures=self.from_worker(self._report),
            on_ended=self.from_worker(self._end),
            plugs=plugs,
        )
        for plug in plugs:
            plug.attach(self)
        self._cpu_latency = CpuLatencyRequest()
        self._worker.start()

    def serving(self) -> None:
        """Let plugs begin what takes long: the stage serves its peers now."""
        for plug in self._plugs:
            plug.serving()

    def open(self, message: wire.Open) -> None:
        """Open a session here and at the next stage."""
        try:
            spec = SessionSpec.from_wire(message)
            if self._info.is_tail:
                spec.require_vocabulary(self._info.n_vocab)
            verifier = WindowVerifier.of(spec, self._grammars)
            session = self.sessions.open(spec.session, spec.slot, verifier, spec.resumed, spec.positions)
            num_resumed = session.num_resumed
            if num_resumed:
                log.info(
                    "session_goes_on",
                    stage=self.place.stage_index,
                    session=session.id,
                    num_resumed=num_resumed,
                )
            found = (plug.opened(spec) for plug in self._plugs)
            brought = next((prefix for prefix in found if prefix is not None), None)
            self._scheduler.change(
                SlotAssigned(
                    session.id,
                    spec.source_slot,
                    session.slot,
                    spec.cached,
                    num_resumed,
                    brought,
                    spec.positions,
                )
            )
            # After the windows that compute what a later stage is to copy.
            pass_on = self.from_worker(self._pass_on)
            self._scheduler.change(QueueBarrier(lambda: pass_on(message)))
        except MeshError as error:
            self._report([_failure(message.session, 0, 0, error)])
        self._cpu_latency.update(len(self.sessions))

    def take(self, bundle: wire.WindowBundle) -> None:
        """Queue the windows of live sessions; windows of ended sessions are dropped."""
        try:
            hidden = None if self._info.is_first else EncodedHidden.of_bundle(bundle, self._info.n_embd)
        except MeshError as error:
            self._report(
                [_failure(window.session, window.epoch, window.id, error) for window in bundle.windows]
            )
            return
        self._num_bundles += 1
        times, arrived_us = tuple(bundle.times), monotonic_us()
        travelling = [plug.arriving(bundle) for plug in self._plugs]
        queued = []
        first_row = 0
        for window in bundle.windows:
            admitted = self._admit(window)
            if admitted is not None:
                session, rows = admitted
                queued.append(
                    QueuedWindow(
                        message=window,
                        span=self._span_of(session.slot, window, rows),
                        hidden=hidden,
                        first_row=first_row,
                        verifier=session.verifier,
                        times=times,
                        arrived_us=arrived_us,
                        bundle=self._num_bundles,
                        num_resumed=session.num_resumed,
                        travelling=tuple(
                            message
                            for found in travelling
                            for message in found.get((window.session, window.id), ())
                        ),
                    )
                )
            first_row += len(window.tokens)
        if not queued:
            return
        # Several windows may be several batches, and what the first gives should leave before the second.
        if not (self._computes_in_loop and len(queued) == 1 and self._worker.compute_in_loop(queued[0])):
            self._scheduler.put(*queued)

    def _span_of(self, slot: int, window: wire.Window, rows: NDArray[np.float32] | None) -> Span:
        """Rows of a window, with those that a plug gives in place of ids."""
        if self._info.is_first:
            return Span.of(slot, window, rows)
        return Span.of(slot, window, embedded=rows)

    def _input_of(self, window: wire.Window) -> NDArray[np.float32] | None:
        """Rows that a plug gives in place of ids; None for none.

        Raises:
            MeshError: If a plug refuses the window.
        """
        found = (plug.input_of(window) for plug in self._plugs)
        return next((rows for rows in found if rows is not None), None)

    def _admit(self, window: wire.Window) -> tuple[StageSession, NDArray[np.float32] | None] | None:
        """The session of a window that can be queued, and rows that a plug gives in place of its ids.

        None if it has ended, or the failure was reported.
        """
        try:
            session = self.sessions.admit(window.session, window.epoch)
            if session is None:
                self._scheduler.num_dropped += 1
                return None
            if len(window.tokens) > self._most_rows:
                # No batch has room for it, so it would wait forever.
                raise InvalidWindow(
                    f"a window has {len(window.tokens)} rows; this stage takes {self._most_rows}"
                )
            brings_rows = session.brings_rows(window)
            if len(self._scheduler) >= self._most_queued:
                raise InvalidWindow(f"{self._most_queued} windows wait at this stage: it takes no more")
            return session, self._input_of(window) if brings_rows else None
        except MeshError as error:
            self._report([_failure(window.session, window.epoch, window.id, error)])
            return None

    def take_vocabulary(self, vocabulary: wire.Vocabulary) -> None:
        """Store the vocabulary for grammars, at the tail.

        Raises:
            ProtocolError: If it does not fit the model's.
        """
        if self._info.is_tail:
            self._grammars.take(vocabulary)
        elif self.next is not None:
            self.next.send(vocabulary)

    def cancel(self, session: int, epoch: int) -> None:
        """Void a session's windows below an epoch."""
        self.sessions.cancel(session, epoch)

    def close(self, message: wire.Close) -> None:
        """Close a session."""
        slot = self.sessions.close(message.session)
        # A session that lost its slot to another before left it no more.
        if slot is not None:
            for plug in self._plugs:
                plug.closed(slot, message)
        self._cpu_latency.update(len(self.sessions))

    def close_all(self) -> None:
        """Close all sessions."""
        self.sessions.close_all()
        for plug in self._plugs:
            plug.closed_all()
        self._cpu_latency.update(0)

    def accept(self, term: int, caller: str) -> None:
        """Accept a coordinator's term; see `StageAccess.accept`."""
        if term < self.place.term:
            raise self.place.stale(caller, term)
        if term > self.place.term:
            self.close_all()
            self.place = replace(self.place, term=term)

    def tell(self, reply: wire.ControlReply) -> None:
        """Send a reply to the coordinators that are connected."""
        self._on_reply(reply)

    def answer(self, bundle: wire.VerdictBundle) -> None:
        """Send to the coordinators what comes beside verdicts; see `StageAccess.answer`."""
        self._on_verdicts(bundle)

    @property
    def sent_row_bytes(self) -> int:
        """Current size of a row of hidden states on the wire."""
        return self._worker.sent_row_bytes

    def send_as(self, hidden_type: HiddenType) -> None:
        """Set the format of hidden states on the wire to the next stage."""
        self._worker.send_as(hidden_type)

    def next_lost(self, error: MeshError) -> None:
        """Report the loss of the link to the next stage to the coordinator."""
        log.error("link_lost", stage=self.place.stage_index, reason=error.message)
        self.next = None
        self._report([_failure(0, 0, 0, error)])

    async def drained(self) -> None:
        """Return when the current batch is done: nothing of closed sessions is sent after that."""
        await self.in_worker(lambda: None)

    def stats(self) -> wire.StageStats:
        """Counters since the start."""
        counts = self._worker.counts
        stats = wire.StageStats(
            num_windows=counts.num_windows,
            num_rows=counts.num_rows,
            num_decodes=counts.num_decodes,
            compute_us=counts.compute_us,
            decode_cpu_us=counts.decode_cpu_us,
            num_dropped_windows=self._scheduler.num_dropped,
            num_queued_windows=len(self._scheduler),
            num_open_sessions=len(self.sessions),
            num_sent_bytes=0 if self.next is None else self.next.num_sent_bytes,
            resident_bytes=resident_bytes(),
        )
        for plug in self._plugs:
            plug.count(stats)
        return stats

    def activity(self) -> wire.Activity:
        """Windows that the stage computes now, and those that it has sent on."""
        under_way = self._worker.under_way
        age_us = 0 if under_way is None else max(1, monotonic_us() - under_way.since_us)
        return wire.Activity(
            has_ended=self.failure is not None or not self._worker.is_alive(),
            batch_age_us=age_us,
            batch_rows=0 if under_way is None else under_way.num_rows,
            num_sent=0 if self.next is None else self.next.num_messages,
        )

    async def stop(self) -> None:
        """Stop computing and free the memory."""
        for plug in self._plugs:
            await plug.stop()
        if self.next is not None:
            await self.next.close()
        self._scheduler.close()
        self._cpu_latency.update(0)
        await in_own_thread(self._worker.join)

    def in_worker(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run a function in the computing thread, between two batches, behind all that is queued."""
        done: asyncio.Future[Result] = self._loop.create_future()
        if self.failure is not None:
            done.set_exception(self.failure)
            return done

        def settle(result: Result | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # no error: it is there

        def run() -> None:
            try:
                result, error = work(), None
            except Exception as raised:  # noqa: BLE001 - whatever it is, it is for the waiting task
                result, error = None, raised
            self._loop.call_soon_threadsafe(settle, result, error)

        self._asked.add(done)
        done.add_done_callback(self._asked.discard)
        self.between_batches(run)
        return done

    def between_batches(self, work: Callable[[], object]) -> None:
        """Have a function called in the computing thread, behind all that is queued, unless it has ended."""
        self._scheduler.change(QueueBarrier(work))

    def _end(self, error: BaseException) -> None:
        """Compute nothing any more: windows are lost, or rows in doubt, of sessions that are not known."""
        if self.failure is not None:
            return
        log.error("stage_ended", stage=self.place.stage_index, reason=repr(error), exc_info=error)
        self.failure = StageFailed(f"stage {self.place.stage_index} ended: {error!r}")
        self._scheduler.close()
        for asked in tuple(self._asked):
            if not asked.done():
                asked.set_exception(self.failure)
        self._on_ended(self.failure)

    def _pass_on(self, message: wire.Open) -> None:
        # Also for a session that has ended: later ones rely on the content of its slot at every stage.
        if self.next is not None:
            self.next.send(message)

    def from_worker(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        """A function for the computing thread that runs `handler` in the event loop, in order."""

        def handle(message: Any) -> None:
            try:
                handler(message)
            except Exception as error:  # noqa: BLE001 - what was to be sent is lost: sessions would wait for it
                self._end(error)

        def schedule(message: Any) -> None:
            self._loop.call_soon_threadsafe(handle, message)

        return schedule

    def _send_on(self, bundle: wire.WindowBundle) -> None:
        live = [self.sessions.is_live(window.session, window.epoch) for window in bundle.windows]
        self._scheduler.num_dropped += len(live) - sum(live)
        if not any(live):
            return
        if not all(live):
            _keep_only(bundle, live)
        if self.next is not None:
            self.next.send(bundle)
            return
        error = StageFailed(f"stage {self.place.stage_index} has no link to the next stage")
        self._report([_failure(window.session, window.epoch, window.id, error) for window in bundle.windows])

    def _answer(self, bundle: wire.VerdictBundle) -> None:
        live = [each for each in bundle.verdicts if self.sessions.is_live(each.session, each.epoch)]
        if len(live) != len(bundle.verdicts):
            del bundle.verdicts[:]
            bundle.verdicts.extend(live)
        if live:
            self._on_verdicts(bundle)

    def _report(self, failures: list[wire.Failure]) -> None:
        for failure in failures:
            log.warning(
                "window_failed",
                stage=self.place.stage_index,
                session=failure.session,
                reason=failure.message,
            )
            self.tell(wire.ControlReply(failure=failure))


def monotonic_us() -> int:
    """Monotonic clock of this host, microseconds."""
    return time.monotonic_ns() // 1000


def _keep_only(bundle: wire.WindowBundle, is_kept: Sequence[bool]) -> None:
    """Drop windows of a bundle, and their rows."""
    num_rows = sum(len(window.tokens) for window in bundle.windows)
    row_bytes = len(bundle.hidden) // num_rows if num_rows else 0
    hidden = []
    first = 0
    for window, is_one in zip(bundle.windows, is_kept, strict=True):
        stop = first + row_bytes * len(window.tokens)
        if is_one:
            hidden.append(bundle.hidden[first:stop])
        first = stop
    kept = [window for window, is_one in zip(bundle.windows, is_kept, strict=True) if is_one]
    del bundle.windows[:]
    bundle.windows.extend(kept)
    bundle.hidden = b"".join(hidden)


def _failure(session: int, epoch: int, window_id: int, error: MeshError) -> wire.Failure:
    return wire.Failure(
        session=session, epoch=epoch, window_id=window_id, code=wire_of(error).code, message=error.message
    )
