"""Session: one running request, its windows in flight, verdicts and output queue.

All code here runs in the event loop and never waits: a verdict is judged, and the next window leaves, before
anything is reported.

A session pauses while its reader is too far behind: windows in flight come back, and none leaves until the
reader has caught up. The time at which windows leave never changes the text.

A session whose ring breaks is suspended: its windows in flight are lost, and none leaves until it is replayed
in another ring. A replay takes prompt and answer so far as one long prompt. Samples depend on the position
and on the tokens before it only, so the text is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog

from mesh.coordinator.crash_suspects import CrashHistory
from mesh.coordinator.generation import InFlightWindow, outcomes_of
from mesh.coordinator.telemetry import SessionTelemetry
from mesh.engine import Committed
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import MeshError, PrefixMismatch, ProtocolError, StageFailed
from speculative.acceptance import judge_unread
from speculative.proposer import EMPTY
from stages.sampling.sampler import from_wire
from stages.sampling.session_spec import NOTHING_RESUMED, Resumed, SessionSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mesh.coordinator.generation import Generation, Step, WindowPlan
    from mesh.coordinator.plugs import SessionPlug
    from mesh.coordinator.prefix_cache import PrefixMatch
    from mesh.coordinator.speculation import Speculator
    from mesh.coordinator.stage_streams import BatchTimes
    from mesh.coordinator.telemetry import ActiveRing
    from mesh.engine import GenerationRequest, GenerationStats, PrefillProgress
    from speculative.acceptance import WindowOutcome
    from stages.sampling.sampler import TokenLogprobs

# Several seconds of an answer: a reader that is merely late is not affected.
MAX_UNREAD_TOKENS: Final = 256
log = structlog.get_logger()


class OutputQueue:
    """Queue of the parts of an answer for its reader, with back-pressure.

    Args:
        on_room: Called when a reader that was too far behind has caught up.
    """

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._on_room = on_room
        self._parts: asyncio.Queue[Committed | MeshError] = asyncio.Queue()
        self._num_tokens = 0
        self._is_full = False

    @property
    def is_full(self) -> bool:
        """Whether generation should pause; windows in flight still have room."""
        return self._is_full

    def put(self, part: Committed | MeshError) -> None:
        """Add committed tokens, or the error that ends the answer."""
        if not isinstance(part, MeshError):
            self._num_tokens += len(part.tokens)
            self._is_full = self._is_full or self._num_tokens >= MAX_UNREAD_TOKENS
        self._parts.put_nowait(part)

    async def take(self) -> Committed:
        """Remove and return the oldest part; waits until there is one.

        Raises:
            MeshError: If the error that ends the answer is next.
        """
        part = await self._parts.get()
        if isinstance(part, MeshError):
            raise part
        self._num_tokens -= len(part.tokens)
        if self._is_full and self._num_tokens <= MAX_UNREAD_TOKENS // 2:
            self._is_full = False
            self._on_room()
        return part


@dataclass(frozen=True)
class PendingReplay:
    """Continuation of a replay that a new suspension interrupted."""

    on_replayed: Callable[[], None]
    """See `Session.replay`."""
    is_suspect: bool
    """Likewise."""


class Session:
    """Windows of one generation: sends them, judges their verdicts, decides what follows.

    Args:
        spec: Message that opens the session at every stage.
        generation: State machine of the request.
        active_ring: Ring for its windows.
        initial: Statistics that it begins with.
        speculator: Proposals beyond committed tokens; None for plain decoding.
        cancels: Whether stages are told at once of windows that a rejection voided.
        clock_ms: Monotonic clock, milliseconds.
        on_plain: Called with each window of a session without proposals: the baseline for speculation.
        plugs: What takes part in its windows beside the core.

    Attributes:
        telemetry: Counts and times so far.
        crash_history: Crashes of stages during the session.
        was_under_way: Whether a window was in flight when it was suspended.
        is_slot_unknown: Whether a stage has failed on it, so that the content of its slot is unknown.
    """

    def __init__(
        self,
        spec: SessionSpec,
        generation: Generation,
        active_ring: ActiveRing,
        *,
        initial: GenerationStats,
        speculator: Speculator | None,
        cancels: bool,
        clock_ms: Callable[[], float],
        on_plain: Callable[[WindowOutcome], None] | None = None,
        plugs: Sequence[SessionPlug] = (),
    ) -> None:
        self.telemetry = SessionTelemetry(
            clock_ms(),
            initial=initial,
            explain=None if speculator is None else speculator.summary,
            draft_cost=None if speculator is None else speculator.draft_cost,
            plugs=plugs,
        )
        self._spec = spec
        self._generation = generation
        self._active_ring = active_ring
        self._speculator = speculator
        self._cancels = cancels
        self._on_plain = on_plain
        self._clock_ms = clock_ms
        self._loop = asyncio.get_running_loop()
        self._epoch = 0
        self._num_sent = 0
        self._in_flight_windows: deque[InFlightWindow] = deque()
        self._leaving: list[wire.Window] = []
        # Whether what is in flight has not left yet, since it waits for its group.
        self._is_waiting = False
        self._output_queue = OutputQueue(on_room=self._on_room)
        self._plugs = plugs
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._is_decoding = False
        self._is_over = False
        self._is_suspended = False
        self._is_suspect = False
        self._on_replayed: Callable[[], None] | None = None
        self._is_woken = False
        self._num_verdicts_before = active_ring.ring.num_verdicts
        self.crash_history = CrashHistory()
        self.was_under_way = False
        self.is_slot_unknown = False
        self._is_carried = False

    @property
    def num_named(self) -> int | None:
        """Number of its first rows that are what their ids say; None for all."""
        found = (plug.num_named for plug in self._plugs)
        return min((num for num in found if num is not None), default=None)

    @property
    def is_carried(self) -> bool:
        """See `PrefixMatch`."""
        return self._is_carried or self.num_named is not None

    @is_carried.setter
    def is_carried(self, is_carried: bool) -> None:
        self._is_carried = is_carried

    @property
    def id(self) -> int:
        """Session id at the stages: a new one in each ring, never used twice."""
        return self._spec.session

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be sent, though its reader may not have read all."""
        return self._is_over

    @property
    def request(self) -> GenerationRequest:
        """The request that it answers."""
        return self._generation.request

    @property
    def slot(self) -> int:
        """Its slot at every stage, while it runs."""
        return self._spec.slot

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and committed tokens."""
        return self._generation.tokens

    @property
    def num_to_compute(self) -> int:
        """Tokens so far, which a replay computes again."""
        return self._generation.position

    @property
    def computed(self) -> tuple[int, ...]:
        """Token ids from position 0 on that every stage is known to hold."""
        return self._generation.computed

    @property
    def return_points(self) -> tuple[int, ...]:
        """See `Generation.return_points`."""
        return self._generation.return_points

    @property
    def is_paused(self) -> bool:
        """Whether it waits for its reader."""
        return self._output_queue.is_full

    @property
    def num_overtaking(self) -> int | None:
        """Verdicts on windows of others since its own latest; None if it waits for no stage."""
        if self._is_still or self._is_held or not self._in_flight_windows:
            return None
        return self._active_ring.ring.num_verdicts - self._num_verdicts_before

    @property
    def prefill_progress(self) -> PrefillProgress:
        """See `Generation.prefill_progress`."""
        return self._generation.prefill_progress

    @contextlib.contextmanager
    def failing_alone(self) -> Iterator[None]:
        """Do a part of its work: an error that nothing expects ends this session, and no other."""
        try:
            yield
        except Exception as raised:
            log.exception("session_failed", session=self.id)
            error = StageFailed(f"the coordinator failed on a session: {raised!r}")
            if self._is_over:
                # The last tokens may not have reached the queue.
                self._output_queue.put(error)
            self.fail(error)

    def start(self, prompt: tuple[int, ...]) -> None:
        """Send the first chunks of the prompt; the others follow as these are computed."""
        for plug in self._plugs:
            plug.listen(self._on_chunk_ready)
            plug.attach(self.id, is_elsewhere=False)
        self._open()
        if self._speculator is not None:
            self._speculator.listen(self._wake)
            self._speculator.begin(prompt, self._loop.call_soon)
            self._pump()

    def suspend(self) -> PendingReplay:
        """Take all windows in flight for lost, and send none until `replay`.

        Returns:
            Continuation of the replay that this suspension interrupts, if there is one.
        """
        self._is_suspended = True
        pending = PendingReplay(self._on_replayed or _nothing, is_suspect=self._is_suspect)
        self._on_replayed = None
        self.was_under_way = bool(self._in_flight_windows) and not self._is_waiting
        self._is_waiting = False
        self._count_decoding(is_decoding=False)
        self._in_flight_windows.clear()
        self._void_parts()
        if self.num_to_compute == len(self.request.prompt):
            # Nothing is committed: the replay scores the prompt again.
            self._prompt_logprobs.clear()
        voided = self._generation.rewind()
        if voided and self._speculator is not None:
            self._speculator.landed(is_void=True)
        return pending

    def replay(
        self,
        id: int,
        prefix_match: PrefixMatch,
        active_ring: ActiveRing,
        on_replayed: Callable[[], None],
        *,
        is_suspect: bool = False,
    ) -> None:
        """Begin again with prompt and answer so far, and continue from there.

        Args:
            id: An id that was never used before.
            prefix_match: Slot and cached prefix; the prefix may be computed by windows sent before.
            active_ring: Ring for its windows from now on.
            on_replayed: Called once all that it replays was sent, or it has ended.
            is_suspect: Whether `on_replayed` is called only with its next token, after which it waits for
                `clear_suspicion`.
        """
        self._on_replayed = on_replayed
        is_elsewhere = active_ring is not self._active_ring
        self.is_carried = is_elsewhere or prefix_match.is_carried
        for plug in self._plugs:
            plug.attach(id, is_elsewhere=is_elsewhere)
        if not is_elsewhere:
            # It begins anew because a stage does not hold what was expected.
            self._generation.resume_before(0)
        self._spec = replace(
            self._spec,
            session=id,
            cached=self.tokens[: prefix_match.num_cached],
            source_slot=prefix_match.source_slot,
            fetch=0,
            resumed=Resumed(self.id, self._generation.num_resumable) if is_elsewhere else NOTHING_RESUMED,
        )
        self._generation.skip(prefix_match.num_cached)
        self._active_ring = active_ring
        self._epoch = 0
        self._is_suspect = is_suspect
        self._is_suspended = False
        self.is_slot_unknown = False
        if self._is_over:
            self._note_replayed()
            return
        num_tokens, num_cached = self.num_to_compute, prefix_match.num_cached
        log.info("session_replays", session=id, num_tokens=num_tokens, num_cached=num_cached)
        self.telemetry.add_replay()
        self._open()
        self._pump()

    def clear_suspicion(self) -> None:
        """End the trial of this session and all others."""
        self._is_suspect = False
        self.crash_history = CrashHistory()
        if not self._is_still:
            with self.failing_alone():
                self._go_on()

    async def next_part(self) -> Committed:
        """The next committed tokens of the answer.

        Raises:
            MeshError: If the session failed.
        """
        return await self._output_queue.take()

    def on_verdict(self, verdict: wire.Verdict, times: BatchTimes) -> None:
        """Judge the oldest window, send what follows, then report."""
        if self._is_still:
            return
        self._num_verdicts_before = self._active_ring.ring.num_verdicts
        if verdict.epoch != self._epoch:
            self.telemetry.add_stale_verdict(verdict.window_id)
            return
        arrived_ms = self._clock_ms()
        if not self._in_flight_windows or self._in_flight_windows[0].id != verdict.window_id:
            self.fail(
                ProtocolError(f"the tail answered window {verdict.window_id} of {self.id} out of order")
            )
            return
        try:
            self._check_logprobs(verdict)
            step = self._generation.commit(tuple(verdict.tokens))
        except ProtocolError as error:
            self.fail(error)
            return
        in_flight = self._in_flight_windows.popleft()
        self._judge_parts(in_flight, verdict)
        self._active_ring.groups.landed(self.id, 0 if step is None else len(step.judgement.committed))
        if step is None:
            self._prompt_logprobs += from_wire(verdict.logprobs)
            self._prefill()
            self._pump()
        else:
            if in_flight.window.is_prompt:
                self._count_decoding(is_decoding=True)
            self._take(step, in_flight, verdict, times, arrived_ms)
            if self._is_suspect:
                self._note_replayed()
        if (window := in_flight.window).is_prompt:
            is_typical = window.scored_next is None and not window.brings_rows
            elapsed_ms = arrived_ms - in_flight.sent_ms
            self._active_ring.prefill_pace.learn_chunk(times.measures, elapsed_ms, is_typical=is_typical)
            self._report_prefill()

    def on_failure(self, epoch: int, error: MeshError) -> bool:
        """Handle the failure of a stage to compute a window, or to begin with the cached prefix.

        Args:
            epoch: Epoch of the window.
            error: Error of the stage.

        Returns:
            Whether to begin anew with nothing cached or resumed: the cached prefix was not there, or not all
            that was to be resumed, or the window was void and the stage may have emptied the slot for it. If
            not, the answer has ended with `error`.
        """
        self.is_slot_unknown = True
        if self._is_still:
            return False
        is_cached_unconfirmed = self._generation.num_cached and not self._generation.computed
        # With nothing resumed it cannot be so again in this ring.
        is_unresumable = isinstance(error, PrefixMismatch) and self._spec.resumed != NOTHING_RESUMED
        if is_cached_unconfirmed or is_unresumable or epoch < self._epoch:
            return True
        self.fail(error)
        return False

    def fail(self, error: MeshError) -> None:
        """End the answer with `error`."""
        self.is_slot_unknown = True
        if not self._is_over:
            self._is_over = True
            # After tokens that were committed before and are not yet in the queue.
            self._loop.call_soon(self._output_queue.put, error)
            self._count_decoding(is_decoding=False)
            self._note_replayed()

    def close(self, keep: wire.Keep | None = None) -> None:
        """Send nothing more, free the slot at every stage, and close the proposer.

        Args:
            keep: What the stages are to keep of the slot, if a plug wants anything.
        """
        self._is_over = True
        self._active_ring.ring.close_session(self.id, keep)
        self._count_decoding(is_decoding=False)
        self._note_replayed()
        for plug in self._plugs:
            plug.detach()
        if self._speculator is not None:
            self._speculator.close()

    @property
    def _is_still(self) -> bool:
        return self._is_over or self._is_suspended

    @property
    def _is_held(self) -> bool:
        return self.is_paused or self._is_suspect

    def _open(self) -> None:
        message = self._spec.to_wire()
        for plug in self._plugs:
            plug.opening(message)
        self._active_ring.ring.open_session(message)
        self._prefill()
        self._report_prefill()

    def _report_prefill(self) -> None:
        if self.request.on_prefill is not None:
            self.request.on_prefill(self.prefill_progress)

    def _count_decoding(self, *, is_decoding: bool) -> None:
        if is_decoding == self._is_decoding:
            return
        self._is_decoding = is_decoding
        self._active_ring.prefill_pace.num_decoding += 1 if is_decoding else -1
        if is_decoding:
            self._active_ring.groups.join(self.id, self.slot)
        else:
            self._active_ring.groups.leave(self.id)

    def _note_replayed(self) -> None:
        on_replayed, self._on_replayed = self._on_replayed, None
        if on_replayed is not None:
            on_replayed()

    def _check_logprobs(self, verdict: wire.Verdict) -> None:
        wanted = 0 if self._spec.num_top_logprobs is None else len(verdict.tokens)
        if len(verdict.logprobs) != wanted:
            raise ProtocolError(
                f"the tail sent {len(verdict.logprobs)} logprobs for {len(verdict.tokens)} ids, not {wanted}"
            )
        if any(len(each.top_tokens) != len(each.top_logprobs) for each in verdict.logprobs):
            raise ProtocolError("the tail sent top tokens without a logprob for each")

    def _take(
        self,
        step: Step,
        in_flight: InFlightWindow,
        verdict: wire.Verdict,
        times: BatchTimes,
        arrived_ms: float,
    ) -> None:
        voided = tuple(self._in_flight_windows) if step.voided else ()
        if voided or step.judgement.is_rejected:
            self._epoch += 1
            self._in_flight_windows.clear()
            self._void_parts()
        is_plain = not in_flight.window.proposal.tokens
        if self._speculator is None:
            self._send_on(step)
            if self._on_plain is not None:
                for outcome in outcomes_of(
                    step,
                    in_flight,
                    voided=voided,
                    behind=self._in_flight_windows,
                    stages=times.measures,
                    arrived_ms=arrived_ms,
                ):
                    self._on_plain(outcome)
        else:
            if voided or not in_flight.window.is_prompt:
                self._speculator.landed(is_void=bool(voided))
            outcomes = outcomes_of(
                step,
                in_flight,
                voided=voided,
                behind=self._in_flight_windows,
                stages=times.measures,
                arrived_ms=arrived_ms,
            )
            self._speculator.committed(step.judgement.committed)
            # What a plain window taught is learned after the next one has left.
            if not is_plain:
                self._speculator.learn(outcomes)
            self._send_on(step)
            if is_plain:
                self._speculator.learn(outcomes)
        if voided and self._cancels and step.finish is None:
            self._active_ring.ring.cancel(self.id, self._epoch)
            self.telemetry.add_cancel()
        if voided:
            log.debug("windows_voided", session=self.id, epoch=self._epoch, num_windows=len(voided))
        self._is_over = step.finish is not None
        self._count_decoding(is_decoding=not self._is_over)
        report = functools.partial(
            self._report, step, in_flight, verdict, voided=voided, times=times, arrived_ms=arrived_ms
        )
        # One turn of the event loop later, so that what was sent is on the wire first.
        self._loop.call_soon(self._do_alone, report)

    def _do_alone(self, work: Callable[[], None]) -> None:
        with self.failing_alone():
            work()

    def _judge_parts(self, in_flight: InFlightWindow, verdict: wire.Verdict) -> None:
        for plug in self._plugs:
            plug.judged(in_flight, verdict)

    def _void_parts(self) -> None:
        for plug in self._plugs:
            plug.voided()

    def _report(
        self,
        step: Step,
        in_flight: InFlightWindow,
        verdict: wire.Verdict,
        *,
        voided: tuple[InFlightWindow, ...],
        times: BatchTimes,
        arrived_ms: float,
    ) -> None:
        telemetry = self.telemetry
        window = in_flight.window
        stages, elapsed_ms = times.measures, arrived_ms - in_flight.sent_ms
        if window.is_prompt:
            telemetry.add_prefilled(arrived_ms)
        else:
            pace = self._active_ring.prefill_pace
            pace.learn_window(stages, elapsed_ms, num_ahead=in_flight.num_ahead)
            self._active_ring.add_round_trip(times.stages, in_flight.sent_ms, arrived_ms)
            telemetry.add_window(
                step.judgement,
                window.proposal,
                times.stages,
                sent_ms=in_flight.sent_ms,
                arrived_ms=arrived_ms,
                num_recomputed=window.num_recomputed,
            )
        if step.is_unread_next:
            unread = voided[0].window.proposal
            telemetry.add_unread(judge_unread(len(unread.tokens)), unread)
        for index, void in enumerate(voided):
            is_judged = index == 0 and step.is_unread_next
            telemetry.add_void(void.id, len(void.window.tokens), EMPTY if is_judged else void.window.proposal)
        tokens = step.judgement.committed
        # A verdict may continue behind an end token, or behind the answer's last.
        logprobs = from_wire(verdict.logprobs[: len(tokens)])
        was_paused = self.is_paused
        scores = tuple(self._prompt_logprobs)
        self._prompt_logprobs.clear()
        self._output_queue.put(Committed(tokens, step.finish, telemetry.stats(), logprobs, scores))
        if self.is_paused and not was_paused:
            log.debug("session_paused", session=self.id, reason="its client reads nothing")

    def _prefill(self) -> None:
        """Keep as many chunks of the prompt in flight as keep the stages busy."""
        generation, pace = self._generation, self._active_ring.prefill_pace
        has_rows, is_replay = bool(generation.request.inputs), self._on_replayed is not None
        while not generation.is_prefilled:
            if any(plug.awaits(generation.num_prefilled) for plug in self._plugs):
                break
            rows = pace.rows(generation.num_to_prefill, has_rows=has_rows, is_replay=is_replay)
            if generation.num_in_flight >= pace.num_in_flight(rows, is_replay=is_replay):
                break
            self._send(generation.prefill(rows))
        self._depart()
        if generation.is_prefilled and not self._is_suspect:
            self._note_replayed()

    def _on_chunk_ready(self, error: MeshError | None) -> None:
        """Send the chunk that had to wait; a replay looks again by itself."""
        if error is not None:
            self.fail(error)
        elif not self._is_still:
            with self.failing_alone():
                self._prefill()
                self._pump()

    def _send_on(self, step: Step) -> None:
        if step.finish is None:
            self._go_on()

    def _on_room(self) -> None:
        if not self._is_still:
            log.debug("session_goes_on", session=self.id)
            self._go_on()

    def _go_on(self) -> None:
        """Keep at least the committed token in flight."""
        if not self._in_flight_windows and not self._is_held:
            proposal = EMPTY
            if self._speculator is not None:
                proposal = self._speculator.next_proposal(self._generation)
            self._send(self._generation.next_window(proposal))
        self._pump()

    def _pump(self) -> None:
        """Fill the ring as far as the controller decides."""
        speculator = self._speculator
        if speculator is not None and self._generation.is_prefilled and not self._is_held:
            while (proposal := speculator.next_proposal(self._generation)).tokens:
                self._send(self._generation.next_window(proposal))
        self._depart()

    def _wake(self) -> None:
        """Callback of the proposer when it has more to propose; called from any thread."""
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_wake)

    def _on_wake(self) -> None:
        self._is_woken = False
        if not self._is_still:
            self._do_alone(self._pump)

    def _send(self, window: WindowPlan) -> None:
        if not self._in_flight_windows:
            self._num_verdicts_before = self._active_ring.ring.num_verdicts
        message = wire.Window(
            session=self.id,
            epoch=self._epoch,
            id=self._num_sent,
            start=window.start,
            tokens=window.tokens,
            verify_rows=window.num_verified,
            recomputed_rows=window.num_recomputed,
            scored_next=window.scored_next,
            **window.asks,
        )
        for plug in self._plugs:
            plug.sending(self._num_sent, window, message)
        self._leaving.append(message)
        self._in_flight_windows.append(
            InFlightWindow(self._num_sent, window, self._clock_ms(), len(self._in_flight_windows))
        )
        self._num_sent += 1

    def _depart(self) -> None:
        """Hand over the windows that were made since the last time."""
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            is_first = len(leaving) == len(self._in_flight_windows)
            is_leaving = self._active_ring.groups.send(
                self.id, leaving, is_first=is_first, on_left=self._on_left
            )
            self._is_waiting = not is_leaving

    def _on_left(self, now_ms: float) -> None:
        """Windows that waited for their group leave: until now they were on no wire."""
        self._is_waiting = False
        self._in_flight_windows = deque(each._replace(sent_ms=now_ms) for each in self._in_flight_windows)


def session_spec(session: int, prefix_match: PrefixMatch, request: GenerationRequest) -> SessionSpec:
    """Message that opens a session at every stage.

    Args:
        session: Its id.
        prefix_match: Its slot, and the cached prefix of its prompt.
        request: Its request.
    """
    return SessionSpec(
        session,
        prefix_match.slot,
        request.sampling,
        len(request.prompt),
        request.num_top_logprobs,
        request.prompt[: prefix_match.num_cached],
        prefix_match.source_slot,
        grammar=request.grammar,
        fetch=prefix_match.fetch,
        client=b"" if request.client is None else hashlib.sha256(request.client.encode()).digest(),
    )


def _nothing() -> None:
    """Does nothing."""
