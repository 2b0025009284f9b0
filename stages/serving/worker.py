"""Worker of a stage, which owns llama.cpp: decodes, then samples or encodes."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import structlog

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import MeshError, StageFailed, wire_of
from stages.sampling.sampler import to_wire
from stages.serving.own_processors import own_processors
from stages.serving.scheduler import QueueBarrier
from stages.transport.hidden_codec import TO_WIRE, HiddenType, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from stages.runtime.stage_runtime import StageRuntime
    from stages.serving.plugs import Bundle, StagePlug
    from stages.serving.scheduler import Change, QueuedWindow, SlotAssigned, WindowScheduler
    from stages.serving.slots import KvSlots

# The event loop stands still while it computes: what takes longer is for the worker's thread.
_LONGEST_IN_LOOP_US: Final = 15_000
# A stage that has been idle for less is busy: there, messages are better read while it computes.
_LEAST_IDLE_US: Final = 1_000
_NOTHING: Final = nullcontext()

log = structlog.get_logger()


@dataclass
class WorkerCounts:
    """Counters of the thread, written by it alone."""

    num_windows: int = 0
    """Windows computed."""
    num_rows: int = 0
    """Rows computed."""
    num_decodes: int = 0
    """Batches computed."""
    compute_us: int = 0
    """Time spent computing them."""
    decode_cpu_us: int = 0
    """Processor time of this thread inside llama.cpp."""


class UnderWay(NamedTuple):
    """The computation under way."""

    since_us: int
    """When it began."""
    num_rows: int
    """Rows of the batch; 0 for a change of a slot."""


class StageWorker(threading.Thread):
    """Thread that runs until its scheduler is closed, then frees the runtime.

    While it waits for work, the event loop may compute a single window itself, see `compute_in_loop`: handing
    it over to a thread and back takes two wake-ups, a good part of what a token costs around computing if
    only one session runs. One thread computes at a time, and that one is meant by "in this thread" below.

    Args:
        runtime: Owned by this object from `start` on.
        scheduler: Source of windows.
        clock_us: Monotonic clock, microseconds.
        hidden_type: Format of hidden states on the wire to the next stage.
        slots: KV cache and sent rows, used in this thread.
        plugs: What takes part in its batches beside the core.
        on_windows: Called with the windows of a batch for the next stage, in this thread.
        on_verdicts: Called with the tail's verdicts on a batch, in this thread.
        on_failures: Called with windows that could not be computed, in this thread.
        on_ended: Called with an error that no session can be failed for, in this thread: rows of any slot may
            be in doubt, and nothing is computed any more.

    Attributes:
        counts: Counters.
        under_way: What is being computed; None while it waits. To be read by other threads.
        has_failed: Whether `on_ended` was called.
    """

    def __init__(
        self,
        runtime: StageRuntime,
        scheduler: WindowScheduler,
        *,
        clock_us: Callable[[], int],
        hidden_type: HiddenType,
        slots: KvSlots,
        on_windows: Callable[[wire.WindowBundle], None],
        on_verdicts: Callable[[wire.VerdictBundle], None],
        on_failures: Callable[[list[wire.Failure]], None],
        on_ended: Callable[[BaseException], None],
        plugs: Sequence[StagePlug] = (),
    ) -> None:
        super().__init__(name="stage-worker", daemon=True)
        self._runtime = runtime
        self._scheduler = scheduler
        self._clock_us = clock_us
        self._hidden_type = hidden_type
        self._slots = slots
        self._on_windows = on_windows
        self._on_verdicts = on_verdicts
        self._on_failures = on_failures
        self._on_ended = on_ended
        self._plugs = plugs
        # Around the next computation; the first one starts llama.cpp's threads.
        self._around: AbstractContextManager[None] = own_processors(runtime.num_threads)
        # Held by the thread that computes.
        self._turn = threading.Lock()
        self._finished_us = clock_us()
        # Whether the next batch may also copy caches from slot to slot, which takes long.
        self._has_new_slots = False
        # Longest recent time of a batch, by its number of rows.
        self._longest_us: dict[int, int] = {}
        self.counts = WorkerCounts()
        self.under_way: UnderWay | None = None
        self.has_failed = False

    def send_as(self, hidden_type: HiddenType) -> None:
        """Set the format of hidden states for later windows."""
        self._hidden_type = hidden_type

    def run(self) -> None:
        """Work until the queue is closed, or it has failed."""
        while not (self._scheduler.is_closed or self.has_failed):
            self._scheduler.wait()
            with self._turn:
                self._work()
        self._runtime.close()

    def compute_in_loop(self, window: QueuedWindow) -> bool:
        """Compute a window that came alone in the calling thread, that of the event loop.

        Only if the stage is idle and the window is likely to be short.

        Returns:
            Whether it was done; if not, nothing was.
        """
        if not self._is_short(window) or not self._turn.acquire(blocking=False):
            return False
        try:
            is_idle = self._scheduler.is_empty and self._clock_us() - self._finished_us >= _LEAST_IDLE_US
            if not is_idle or self._has_new_slots:
                return False
            self._scheduler.put_ready(window)
            self._work()
        finally:
            self._turn.release()
        return True

    def _is_short(self, window: QueuedWindow) -> bool:
        span = window.span
        # Prompts have lengths of their own, and copies of states and grammars take times that differ widely.
        if window.is_chunk or span.is_costly or window.verifier.has_grammar:
            return False
        if any(plug.outlasts(window) for plug in self._plugs):
            return False
        longest_us = self._longest_us.get(len(span.tokens))
        return longest_us is not None and longest_us < _LONGEST_IN_LOOP_US

    def _work(self) -> None:
        """Compute all that waits."""
        try:
            while not self.has_failed and self._work_once():
                pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the stage must not seem to live on
            self.has_failed = True
            self._on_ended(error)
        finally:
            self.under_way = None

    def _work_once(self) -> bool:
        """Compute the next batch, if there is one; returns whether there was."""
        self.under_way = UnderWay(self._clock_us(), 0)
        work = self._scheduler.take_ready()
        if work is None:
            return False
        for change in work.changes:
            self._change(change)
        started_us = self._clock_us()
        self.under_way = UnderWay(started_us, sum(len(window.span.tokens) for window in work.windows))
        live = [window for window in work.windows if not any(plug.voids(window) for plug in self._plugs)]
        self._scheduler.num_dropped += len(work.windows) - len(live)
        windows = self._without_invalid(self._without_held(live, started_us))
        if windows:
            self._compute(windows, started_us)
            self._finished_us = self._clock_us()
            self._has_new_slots = False
        return True

    def _change(self, change: Change) -> None:
        if isinstance(change, QueueBarrier):
            change.on_passed()
        else:
            self._begin(change)

    def _begin(self, assigned: SlotAssigned) -> None:
        self._has_new_slots = True
        try:
            self._slots.begin(
                assigned.slot,
                assigned.source,
                assigned.cached,
                assigned.num_resumed,
                self.sent_row_bytes,
                brought=assigned.brought,
                positions=assigned.positions,
            )
        except Exception as raised:  # noqa: BLE001 - the emptied slot is known whatever it was
            # The slot holds another session's rows: no window may use them.
            self._slots.trim(assigned.slot, 0)
            error = _known(raised)
            if assigned.cached or error is not raised:
                failure = wire.Failure(
                    session=assigned.session, code=wire_of(error).code, message=error.message
                )
                self._on_failures([failure])

    def _without_held(self, windows: Sequence[QueuedWindow], started_us: int) -> list[QueuedWindow]:
        """The windows, or parts, to be computed; rows that are held are sent again."""
        left = []
        for whole in windows:
            try:
                window = self._with_held(whole)
            except Exception as error:  # noqa: BLE001 - the emptied slot is known whatever it was
                # The session begins anew. Until then no window may go on from its former rows.
                self._slots.trim(whole.span.slot, 0)
                self._on_failures([failure_of(whole, _known(error))])
                continue
            if window.num_held and window.num_held == len(window.span.tokens):
                self._send_again(window, started_us)
            else:
                left.append(window)
        return left

    def _with_held(self, window: QueuedWindow) -> QueuedWindow:
        """The window with the number of its first rows that are held, if it requests nothing of them.

        Raises:
            PrefixMismatch: If the slot, with recurrent state, cannot go back to where the others begin.
        """
        if not window.num_resumed:
            return window
        span = window.span
        stop = min(window.num_resumed, self._runtime.memory.length(span.slot), span.start + len(span.tokens))
        most = min(stop - span.start, len(span.tokens) - span.num_outputs)
        num_held = self._slots.num_reusable(span, most, self.sent_row_bytes)
        if not num_held:
            return window
        if self._runtime.info.is_tail:
            return replace(window, num_held=num_held)
        held = self._slots.find_sent(replace(span, tokens=span.tokens[:num_held]), self.sent_row_bytes)
        return window if held is None else replace(window, num_held=num_held, held=held)

    def _send_again(self, window: QueuedWindow, started_us: int) -> None:
        """Answer a window without computing."""
        times = _times(window, started_us)
        if self._runtime.info.is_tail:
            verdict = self._verdict(window, np.empty((0, self._runtime.info.n_vocab), np.float32))
            if verdict is not None:
                bundle = wire.VerdictBundle(verdicts=[verdict], times=times)
                self._pass_on([window], bundle)
                self._on_verdicts(bundle)
        else:
            onward = self._bundle([window.message], window.held, times)
            self._pass_on([window], onward)
            self._on_windows(onward)

    @property
    def sent_row_bytes(self) -> int:
        """Current size of a row of hidden states on the wire."""
        return self._hidden_type.row_bytes(self._runtime.info.n_embd)

    def _without_invalid(self, windows: list[QueuedWindow]) -> list[QueuedWindow]:
        """The windows with decoded hidden states. An invalid one fails alone, not the batch."""
        valid = []
        for queued in windows:
            try:
                window = queued.decoded()
                self._runtime.check(window.to_compute)
            except Exception as error:  # noqa: BLE001 - nothing of the slot was changed
                self._on_failures([failure_of(queued, _known(error))])
            else:
                valid.append(window)
        return valid

    def _compute(self, windows: list[QueuedWindow], started_us: int) -> None:
        try:
            around, self._around = self._around, _NOTHING
            with around:
                outputs = self._runtime.decode(
                    [replace(window.to_compute, may_be_padded=not window.is_chunk) for window in windows],
                    is_tapped=any(plug.taps(windows) for plug in self._plugs),
                )
            for window in windows:
                self._slots.computed(window.to_compute, window.message.num_committed)
            self._hand_on(windows, outputs, started_us)
        except Exception as error:  # noqa: BLE001 - the emptied slots are known whatever it was
            known = _known(error)
            log.warning("windows_failed", num_windows=len(windows), reason=str(known))
            for window in windows:
                self._slots.trim(window.span.slot, 0)
            self._on_failures([failure_of(window, known) for window in windows])

    def _hand_on(
        self, windows: list[QueuedWindow], outputs: list[NDArray[np.float32]], started_us: int
    ) -> None:
        counts = self.counts
        num_rows = _num_rows(windows)
        counts.num_windows += len(windows)
        counts.num_rows += num_rows
        counts.num_decodes += 1
        if self._runtime.info.is_tail:
            verdicts = self._verdicts(windows, outputs)
            self._add_to(verdicts, windows)
        else:
            computed = self._encoded(windows, outputs)
            sound = [pair for pair in zip(windows, computed, strict=True) if pair[1]]
            hidden = b"".join(part for window, rows in sound for part in (window.held, rows))
            onward = self._bundle([window.message for window, _rows in sound], hidden)
            self._add_to(onward, windows)
        compute_us = self._clock_us() - started_us
        counts.compute_us += compute_us
        counts.decode_cpu_us = self._runtime.decode_cpu_us
        # The windows of a batch came together, so the same is true of all of them.
        times = _times(windows[0], started_us, compute_us=compute_us, num_rows=num_rows)
        if self._runtime.info.is_tail:
            verdicts.times.extend(times)
            self._on_verdicts(verdicts)
        else:
            onward.times.extend(times)
            self._on_windows(onward)
            # After handing on, since the next stage does not wait for this.
            for window, rows in zip(windows, computed, strict=True):
                self._slots.sent_on(window.to_compute, rows)
        # Nor for these.
        for plug in self._plugs:
            plug.handed_on()
        # It shrinks by and by: one slow batch, such as the first, says little.
        longest_us = self._longest_us.get(num_rows, 0) * 7 // 8
        self._longest_us[num_rows] = max(self._clock_us() - started_us, longest_us)

    def _bundle(
        self, windows: list[wire.Window], hidden: bytes, times: Sequence[wire.StageTime] = ()
    ) -> wire.WindowBundle:
        return wire.WindowBundle(
            windows=windows, hidden=hidden, hidden_type=TO_WIRE[self._hidden_type], times=times
        )

    def _pass_on(self, windows: Sequence[QueuedWindow], bundle: Bundle) -> None:
        for plug in self._plugs:
            plug.passing(windows, bundle)

    def _add_to(self, bundle: Bundle, windows: Sequence[QueuedWindow]) -> None:
        self._pass_on(windows, bundle)
        for plug in self._plugs:
            plug.computed(windows, bundle)

    def _verdicts(
        self, windows: Sequence[QueuedWindow], outputs: Sequence[NDArray[np.float32]]
    ) -> wire.VerdictBundle:
        """Verdicts on all windows but those that cannot be verified."""
        given = []
        for window, logits in zip(windows, outputs, strict=True):
            verdict = self._verdict(window, logits)
            if verdict is not None:
                for plug in self._plugs:
                    plug.verified(window, verdict)
                given.append(verdict)
        return wire.VerdictBundle(verdicts=given)

    def _verdict(self, window: QueuedWindow, logits: NDArray[np.float32]) -> wire.Verdict | None:
        """None if the rows cannot be verified: that fails one session, not the batch."""
        try:
            return self._verify(window, logits)
        except MeshError as error:
            self._slots.give_up(window.span.slot, window.span.start)
            self._on_failures([failure_of(window, error)])
            return None

    @staticmethod
    def _verify(window: QueuedWindow, logits: NDArray[np.float32]) -> wire.Verdict:
        span = window.span
        sampled = window.verifier.verify(logits, span.tokens, span.start, scored_next=window.scored_next)
        return wire.Verdict(
            session=window.session,
            epoch=window.epoch,
            window_id=window.id,
            start=span.start,
            tokens=sampled.tokens,
            logprobs=to_wire(sampled.logprobs),
        )

    def _encoded(self, windows: list[QueuedWindow], outputs: list[NDArray[np.float32]]) -> list[bytes]:
        """Encoded rows of each window; empty if a value is not finite, which fails one session."""
        encoded = []
        for window, hidden in zip(windows, outputs, strict=True):
            try:
                encoded.append(encode(hidden, self._hidden_type))
            except MeshError as error:
                self._slots.give_up(window.span.slot, window.span.start)
                self._on_failures([failure_of(window, error)])
                encoded.append(b"")
        return encoded


def _num_rows(windows: Sequence[QueuedWindow]) -> int:
    return sum(len(window.to_compute.tokens) for window in windows)


def _times(
    window: QueuedWindow, started_us: int, *, compute_us: int = 0, num_rows: int = 0
) -> list[wire.StageTime]:
    """Times of the stages up to this one for the window and those that share its batch."""
    own = wire.StageTime(
        queue_us=max(0, started_us - window.arrived_us),
        compute_us=compute_us,
        num_rows=num_rows,
        arrived_us=window.arrived_us,
    )
    return [*window.times, own]


def _known(error: Exception) -> MeshError:
    """The error for the coordinator; one that nothing expects is logged here, with its origin."""
    if isinstance(error, MeshError):
        return error
    log.error("stage_error", reason=repr(error), exc_info=error)
    return StageFailed(f"stage failed: {error!r}")


def failure_of(window: QueuedWindow, error: MeshError) -> wire.Failure:
    """Failure message for the coordinator."""
    return wire.Failure(
        session=window.session,
        epoch=window.epoch,
        window_id=window.id,
        code=wire_of(error).code,
        message=error.message,
    )
