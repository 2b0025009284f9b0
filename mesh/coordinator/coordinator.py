"""Coordinator: engine over a ring of stages, and the engine that stands in until the ring is connected."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from typing import TYPE_CHECKING, Final

import structlog

from mesh.coordinator.generation import Generation
from mesh.coordinator.plugs import NewRing
from mesh.coordinator.prefix_cache import PrefixMatch
from mesh.coordinator.request_queue import RequestGate, SlotPool
from mesh.coordinator.ring import Ring, RingTerms, StageAddress
from mesh.coordinator.session import Session, session_spec
from mesh.coordinator.session_replay import SessionReplayer, attribute_crash
from mesh.coordinator.speculation import Speculators
from mesh.coordinator.telemetry import ActiveRing
from mesh.engine import GenerationStats, SpeculationReport
from mesh.status import MeshStatus, PrefillStatus, SessionsStatus
from spanmesh_proto.errors import (
    ClusterError,
    InvalidRequest,
    MeshError,
    PrefixMismatch,
    StageFailed,
    from_code,
    too_long,
)
from stages.host.cpu_latency import CpuLatencyRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

    from mesh.coordinator.options import CoordinatorOptions
    from mesh.coordinator.plugs import Plug, RingPlug
    from mesh.coordinator.ring import RingLoss
    from mesh.coordinator.stage_streams import BatchTimes
    from mesh.engine import Committed, GenerationRequest
    from spanmesh_proto import windows_pb2 as wire
    from speculative.acceptance import WindowOutcome
    from speculative.proposer import Proposer
    from stages.transport.channels import Identity

# When a process dies, all of its streams end within this time.
_GATHER_S: Final = 0.05
# Of so many sessions that ended last the slots are known, for failures that come late.
_NUM_ENDED: Final = 1024
# Terms are times in milliseconds, and no coordinator opens a million sessions in one.
_IDS_PER_TERM: Final = 1 << 20

log = structlog.get_logger()


class Coordinator:
    """Engine of a ring: opens sessions, sends windows, commits verdicts. Implements `mesh.engine.Engine`.

    Holds no layers. When the ring breaks, sessions keep their prompt and answer so far and wait. `broken`
    reports the loss to recovery, and `reconnect` replays every session in the new ring. Clients notice a
    pause.

    Args:
        stages: Addresses of the stages, in pipeline order.
        options: Limits of sessions.
        plugs: Parts beside the core, see `mesh.coordinator.composition`.
        mesh_id: Identifier of the ring.
        mesh_key: Key shared by all stages and the coordinator.
        make_proposers: Returns the proposers for a request, cheapest first; none for plain decoding.
        clock_s: Monotonic, seconds.
        identity: TLS identity shown to the stages; None if all run in this process.
        term: Term of this coordinator: higher than that of any earlier coordinator of these stages.
    """

    def __init__(
        self,
        stages: Sequence[StageAddress],
        options: CoordinatorOptions,
        *,
        plugs: Iterable[Plug] = (),
        mesh_id: str,
        mesh_key: str,
        make_proposers: Callable[[GenerationRequest], Sequence[Proposer]] | None,
        clock_s: Callable[[], float],
        identity: Identity | None = None,
        term: int = 0,
    ) -> None:
        self._options = options
        self._clock_s = clock_s
        self._identity = identity
        self._term = term
        self._slots = SlotPool(
            options.num_slots,
            options.max_waiting,
            clock_s,
            can_trim=options.can_trim,
            context_length=options.context_length,
        )
        self._plugs = tuple(plugs)
        self._sessions: dict[int, Session] = {}
        # Slots by session.
        self._ended: deque[tuple[int, int]] = deque(maxlen=_NUM_ENDED)
        self._session_ids = session_ids(term)
        self._past = SpeculationReport()
        self._speculators = Speculators(
            make_proposers, options, num_sessions=self._num_moving, clock_ms=self._clock_ms
        )
        self._cpu_latency = CpuLatencyRequest()
        self._request_gate = RequestGate(options.repair_wait_s)
        self._broken = asyncio.Event()
        self._reconnecting = asyncio.Lock()
        self._replayer: SessionReplayer | None = None
        self._num_reconnects = 0
        self._num_prefix_mismatches = 0
        self._is_whole = False
        self._active_ring = self._open_ring(stages, mesh_id, mesh_key, is_first=True)

    @property
    def context_length(self) -> int:
        """Positions that one session may use, prompt and answer together."""
        return self._options.context_length

    @property
    def is_ready(self) -> bool:
        """Whether every stage is connected."""
        return self._is_whole

    @property
    def num_requests(self) -> int:
        """Requests that hold a slot or wait for one."""
        return self._slots.num_busy + self._slots.num_waiting

    @property
    def refusal(self) -> StageFailed | None:
        """Error for new requests while they are refused at once; during a recovery they wait instead."""
        return self._request_gate.refusal

    async def start(self) -> None:
        """Connect to every stage.

        Raises:
            HostUnreachable: Naming the address that does not answer.
            ProtocolError: If a stage speaks another version or holds other layers than planned.
            StageFailed: If a stage was lost at once.
        """
        await self._active_ring.open()
        self._is_whole = True

    async def stop(self) -> None:
        """Fail what still runs and disconnect."""
        self.give_up(StageFailed("the server is shutting down"))
        await self._active_ring.close()

    async def broken(self) -> RingLoss:
        """Wait until the ring breaks; returns at once while it is broken. Its sessions are suspended then."""
        while True:
            await self._broken.wait()
            # Other stages may be lost together with the first.
            await asyncio.sleep(_GATHER_S)
            if (loss := self._ring.loss) is not None:
                self._ring.stop_monitoring()
                return loss

    def pause(self, reason: str) -> None:
        """Suspend every session until `reconnect`, to rewire a ring that is not broken.

        Args:
            reason: For the log.
        """
        if self._is_whole:
            log.info("ring_paused", reason=reason, num_sessions=len(self._sessions))
            self._ring.stop_monitoring()
            self._suspend()

    async def reconnect(self, stages: Sequence[StageAddress], mesh_id: str, mesh_key: str) -> None:
        """Open a new ring in place of the old one and replay every session in it.

        Args:
            stages: Addresses of its stages, in pipeline order; the number may differ.
            mesh_id: Identifier of the new ring.
            mesh_key: Key shared by its stages and the coordinator.

        Raises:
            HostUnreachable: Naming the address that does not answer. Sessions stay suspended; try again.
            ProtocolError: If a stage speaks another version or holds other layers than planned. Likewise.
            StageFailed: If the new ring broke at once. Likewise.
        """
        async with self._reconnecting:
            self.pause("the ring is rebuilt")
            await self._active_ring.close()
            active_ring = self._open_ring(stages, mesh_id, mesh_key)
            await active_ring.open()
            self._go_on_in(active_ring)

    def give_up(self, error: MeshError) -> None:
        """End every session with `error` and turn new requests away, until a `reconnect`."""
        if self._is_whole:
            self._suspend()
        self._request_gate.shut(error)
        for session in self._sessions.values():
            session.fail(self._request_gate.refusal or error)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """Continue the prompt. Closing the generator frees the session at every stage.

        Raises:
            InvalidRequest: If the prompt is empty, no token is wanted, or a biased token does not exist.
            ContextLengthExceeded: If prompt + 1 exceeds the context.
            Overloaded: If the waiting queue is full.
            StageFailed: If a stage failed, or the ring stays broken for longer than new requests wait.
        """
        check_request(request, self._options)
        async with contextlib.AsyncExitStack() as stack:
            prefix_match = await self._admit(stack, request)
            session = self._session(request, prefix_match)
            self._sessions[session.id] = session
            self._note_sessions()
            floor = prefix_match.floor
            try:
                session.start(request.prompt)
                self._expect(session, request.prompt[: prefix_match.num_cached], floor)
                part = await session.next_part()
                stats = part.stats
                # What loads its rows meanwhile says nothing of the stages.
                if not stats.num_replays and not request.inputs:
                    for plug in self._plugs:
                        plug.prefilled(len(request.prompt) - stats.num_cached, stats.prefill_ms)
                # Other sessions may begin with the same prompt while this one runs.
                self._keep(session, session.computed[: len(request.prompt)], floor)
                yield part
                while part.finish is None:
                    part = await session.next_part()
                    yield part
            finally:
                if session.is_slot_unknown:
                    self._slots.prefix_cache.forget(session.slot)
                else:
                    self._keep(session, session.computed, floor)
                del self._sessions[session.id]
                self._ended.append((session.id, session.slot))
                self._note_sessions()
                session.close(self._to_keep(session))
                self._past = self._past.merge(session.telemetry.report())

    def status(self) -> MeshStatus:
        """What it knows of the mesh: stages with their times, sessions, speculation."""
        loss = self._ring.loss
        refusal = self._request_gate.refusal
        groups = self._active_ring.groups
        status = MeshStatus(
            ready=self.is_ready,
            lost=loss.reason if loss else refusal.message if refusal else None,
            reconnects=self._num_reconnects,
            prefix_mismatches=self._num_prefix_mismatches,
            sessions=SessionsStatus(
                running=self._slots.num_busy,
                waiting=self._slots.num_waiting,
                paused=len(self._sessions) - self._num_moving(),
                slots=self._options.num_slots,
                positions=sum(session.num_to_compute for session in self._sessions.values()),
                prefill=self._prefill(),
                context=self._options.context_length,
                groups=len(groups.sizes),
                largest_group=max(groups.sizes, default=0),
                groups_found=groups.found,
            ),
            speculation=self._report().status(),
            stages=self._active_ring.status(),
            round_trips=self._active_ring.round_trips(),
        )
        for plug in self._plugs:
            plug.describe(status)
        return status

    async def stage_stats(self) -> list[wire.StageStats]:
        """Counters of every stage, in pipeline order.

        Raises:
            TimeoutError: If one does not answer in time.
        """
        return await self._ring.stats()

    @property
    def _ring(self) -> Ring:
        return self._active_ring.ring

    def _open_ring(
        self, stages: Sequence[StageAddress], mesh_id: str, mesh_key: str, *, is_first: bool = False
    ) -> ActiveRing:
        options = self._options
        terms = RingTerms(
            mesh_id,
            mesh_key,
            self._term,
            options.ping_interval_s,
            options.ping_timeout_s,
            options.still_timeout_s,
            options.num_slots,
        )
        plugs: list[RingPlug] = []

        def on_bundle(bundle: wire.VerdictBundle) -> None:
            for plug in plugs:
                plug.received(bundle)

        def on_reply(stage_index: int, reply: wire.ControlReply) -> None:
            for plug in plugs:
                plug.replied(stage_index, reply)

        ring = Ring(
            stages,
            terms,
            on_verdict=self._on_verdict,
            on_bundle=on_bundle,
            on_failure=self._on_failure,
            on_lost=lambda: self._on_lost(ring),
            clock_s=self._clock_s,
            identity=self._identity,
            token_texts=options.token_texts,
            on_reply=on_reply,
            num_overtaking=self._num_overtaking,
        )
        new = NewRing(
            ring, stages, terms, self._identity, options, is_first=is_first, clock_ms=self._clock_ms
        )
        parts = (plug.in_ring(new) for plug in self._plugs)
        plugs += [part for part in parts if part is not None]
        return ActiveRing(
            stages,
            ring,
            options.max_rows,
            clock_ms=self._clock_ms,
            plugs=plugs,
            num_groups=options.num_groups,
        )

    def _suspend(self) -> None:
        self._is_whole = False
        self._request_gate.hold()
        self._active_ring.suspend()
        if self._replayer is not None:
            self._replayer.drop()
        for session in self._sessions.values():
            with session.failing_alone():
                session.suspend()

    def _go_on_in(self, active_ring: ActiveRing) -> None:
        attribute_crash(self._sessions.values(), self._ring.loss, self._options.most_crashes)
        self._active_ring = active_ring
        self._num_reconnects += 1
        self._slots.prefix_cache.forget_all()
        self._speculators.shared.forget_ring()
        self._broken.clear()
        self._is_whole = True
        self._note_sessions()
        log.info("ring_whole_again", num_sessions=len(self._sessions), num_reconnects=self._num_reconnects)
        self._replayer = SessionReplayer(
            tuple(self._sessions.values()), self._replay, on_tried=self._request_gate.open
        )
        self._replayer.start()

    def _replay(self, session: Session, on_replayed: Callable[[], None], *, is_suspect: bool = False) -> None:
        if session.id not in self._sessions:
            on_replayed()
            return
        is_sent = False

        def on_sent() -> None:
            nonlocal is_sent
            is_sent = True
            try:
                if not session.is_over:
                    # The last token may be still to be sent.
                    self._expect(session, session.tokens[:-1])
            finally:
                on_replayed()

        with session.failing_alone():
            prefix_match = self._match_again(session)
            session_id = next(self._session_ids)
            # Before it sends: it counts among the sessions that share the stages.
            self._sessions[session_id] = self._sessions.pop(session.id)
            session.replay(session_id, prefix_match, self._active_ring, on_sent, is_suspect=is_suspect)
        if session.is_over and not is_sent:
            on_replayed()

    def _match_again(self, session: Session) -> PrefixMatch:
        """Cached prefix of a session in a new ring: what it shares with sessions that replay before it."""
        request = session.request
        tokens = session.tokens if request.uses_cache and not session.is_over else ()
        return self._slots.prefix_cache.match(tokens, request.client, {session.slot}, chunks=request.chunks)

    async def _admit(self, stack: contextlib.AsyncExitStack, request: GenerationRequest) -> PrefixMatch:
        """Wait for a connected ring and for a slot, which is held until the stack unwinds."""
        prompt = request.prompt if request.uses_cache else ()
        async with self._request_gate.patience():
            await self._request_gate.opened()
            prefix_match = await stack.enter_async_context(
                self._slots.hold(prompt, request.client, request.max_tokens, chunks=request.chunks)
            )
            if not self._request_gate.is_open:
                # The ring broke while the session waited for the slot: what the slot held is lost.
                await self._request_gate.opened()
                prefix_match = PrefixMatch(prefix_match.slot, prefix_match.slot, 0)
            if request.uses_cache:
                prefix_match = await self._lengthened(prefix_match, request)
        return prefix_match

    async def _lengthened(self, prefix_match: PrefixMatch, request: GenerationRequest) -> PrefixMatch:
        """The cached prefix, or a longer one that a plug brings."""
        for plug in self._plugs:
            active_ring, slot = self._active_ring, prefix_match.slot
            found = await plug.lengthened(prefix_match, request)
            if active_ring is not self._active_ring or not self._request_gate.is_open:
                # The ring broke meanwhile: what was in memory is lost.
                await self._request_gate.opened()
                return PrefixMatch(slot, slot, 0)
            if found is not None:
                prefix_match = found
            elif prefix_match.source_slot != slot:
                # Another slot may have changed meanwhile.
                prefix_match = self._slots.prefix_cache.match(
                    request.prompt, request.client, {slot}, chunks=request.chunks
                )
        return prefix_match

    def _expect(self, session: Session, tokens: Sequence[int], floor: int = 0) -> None:
        """Record what the slot of a session will hold; see `PrefixCache.expect`."""
        self._slots.prefix_cache.expect(
            session.slot,
            session.request.client,
            tokens[: session.num_named],
            floor=floor,
            is_carried=session.is_carried,
        )

    def _keep(self, session: Session, computed: Sequence[int], floor: int) -> None:
        """Record what the slot of a session holds; see `PrefixCache.keep`."""
        num_named, points = session.num_named, session.return_points
        self._slots.prefix_cache.keep(
            session.slot,
            session.request.client,
            computed[:num_named],
            # A point at the end would count as the end of what the slot holds, which is more.
            points if num_named is None else [point for point in points if point < num_named],
            floor=floor,
            is_carried=session.is_carried,
        )

    def _to_keep(self, session: Session) -> wire.Keep | None:
        """What the stages are to keep of a session that has ended."""
        request = session.request
        if session.is_slot_unknown or not self._is_whole or not request.uses_cache:
            return None
        if session.is_carried:
            # Some of its rows may have been computed on other hosts.
            return None
        found = (plug.kept(request, session.computed, session.return_points) for plug in self._plugs)
        return next((keep for keep in found if keep is not None), None)

    def _note_sessions(self) -> None:
        self._cpu_latency.update(len(self._sessions))

    def _session(self, request: GenerationRequest, prefix_match: PrefixMatch) -> Session:
        options = self._options
        spec = session_spec(next(self._session_ids), prefix_match, request)
        rollbacks = (plug.rollback(prefix_match) for plug in self._plugs)
        generation = Generation(
            request,
            context_length=options.context_length,
            max_rows=options.max_rows,
            num_cached=prefix_match.num_cached,
            rollback=next((each for each in rollbacks if each is not None), None),
        )
        speculator = self._speculators.make(spec.session, request)
        parts = (plug.in_session(generation, speculator) for plug in self._plugs)
        session = Session(
            spec,
            generation,
            self._active_ring,
            initial=GenerationStats(num_cached=prefix_match.num_cached),
            speculator=speculator,
            cancels=options.cancels,
            clock_ms=self._clock_ms,
            on_plain=self._learn_plain if self._speculators.are_any else None,
            plugs=[part for part in parts if part is not None],
        )
        session.is_carried = prefix_match.is_carried
        return session

    def _learn_plain(self, outcome: WindowOutcome) -> None:
        if len(self._sessions) == 1:
            self._speculators.shared.add_plain(outcome)

    def _prefill(self) -> tuple[PrefillStatus, ...]:
        """Prompts that are being read."""
        reading = [session.prefill_progress for session in self._sessions.values() if not session.is_over]
        return tuple(
            PrefillStatus(read=each.num_read, prompt=each.num_tokens) for each in reading if not each.is_whole
        )

    def _num_moving(self) -> int:
        """Sessions that send windows: one that waits for its reader uses no stage."""
        return sum(not session.is_paused for session in self._sessions.values())

    def _report(self) -> SpeculationReport:
        """Speculation statistics, running sessions included."""
        report = self._past
        for session in self._sessions.values():
            report = report.merge(session.telemetry.report())
        return report

    def _clock_ms(self) -> float:
        return self._clock_s() * 1000

    def _on_verdict(self, verdict: wire.Verdict, times: BatchTimes) -> None:
        session = self._sessions.get(verdict.session)
        if session is not None:
            with session.failing_alone():
                session.on_verdict(verdict, times)
        self._active_ring.count(times.stages)

    def _on_failure(self, stage_index: int, failure: wire.Failure) -> None:
        error = from_code(failure.code, f"stage {stage_index}: {failure.message}")
        session = self._sessions.get(failure.session)
        if session is None:
            # The session has ended, or began anew; the stage may have emptied its slot.
            for slot in {slot for ended, slot in self._ended if ended == failure.session}:
                self._slots.prefix_cache.forget(slot)
        else:
            with session.failing_alone():
                if session.on_failure(failure.epoch, error):
                    self._begin_anew(session, error)

    def _begin_anew(self, session: Session, error: MeshError) -> None:
        """Replay a session in the same ring, with nothing cached."""
        is_mismatch = isinstance(error, PrefixMismatch)
        self._num_prefix_mismatches += is_mismatch
        event = "prefix_mismatch" if is_mismatch else "session_begins_anew"
        log.warning(event, session=session.id, slot=session.slot, reason=error.message)
        # Those of others are not in doubt; should one be wrong all the same, that costs time only.
        self._slots.prefix_cache.forget_client(session.request.client)
        self._ended.append((session.id, session.slot))
        # Other sessions may wait for this one in the order of replays.
        pending = session.suspend()
        self._ring.close_session(session.id)
        self._replay(session, pending.on_replayed, is_suspect=pending.is_suspect)

    def _num_overtaking(self) -> int | None:
        """See `WindowMonitor.tick`."""
        found = [session.num_overtaking for session in self._sessions.values()]
        return max((each for each in found if each is not None), default=None)

    def _on_lost(self, ring: Ring) -> None:
        if self._is_whole and ring is self._ring:
            try:
                self._suspend()
            finally:
                self._broken.set()


class PendingEngine:
    """Engine of a model from its start on: passes requests to the coordinator once the ring is connected.

    Args:
        context_length: See the attribute.

    Attributes:
        context_length: Positions of one session, prompt and answer together. Where it is chosen once hosts
            have joined, the fewest that are chosen until then.
        coordinator: None until the ring is connected.
        ended: Error for all requests, once the model was unloaded.
    """

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length
        self.coordinator: Coordinator | None = None
        self.ended: MeshError | None = None

    @property
    def is_ready(self) -> bool:
        """Whether every stage is connected."""
        return self.coordinator is not None and self.coordinator.is_ready

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return 0 if self.coordinator is None else self.coordinator.num_requests

    @property
    def refusal(self) -> MeshError | None:
        """Error for all requests while the model cannot be served until hosts join."""
        return None if self.coordinator is None else self.coordinator.refusal

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """See `Engine.generate`.

        Raises:
            ClusterError: While the model is loading.
            MeshError: Once it was unloaded.
        """
        if self.ended is not None:
            raise self.ended
        if self.coordinator is None:
            raise ClusterError("the model is still loading: try again in a moment", retry_after_s=2)
        return self.coordinator.generate(request)


def check_request(request: GenerationRequest, options: CoordinatorOptions) -> None:
    """Check that a request can be answered.

    Raises:
        InvalidRequest: If the prompt is empty, no token is wanted, a biased token does not exist, a prompt is
            to be scored that is not all tokens, or the vocabulary for a grammar is missing.
        ContextLengthExceeded: If prompt + 1 exceeds the context.
    """
    if not request.prompt:
        raise InvalidRequest("the prompt is empty: send at least one token", param="prompt")
    if request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {request.max_tokens}; ask for at least 1", param="max_tokens")
    if len(request.prompt) + 1 > options.context_length:
        raise too_long(
            len(request.prompt),
            options.context_length,
            "send less, as the answer needs room too, or serve the model with a larger --ctx-size",
            what="the prompt",
            most=options.context_length - 1,
        )
    if request.scores_prompt and request.has_rows:
        raise InvalidRequest(
            "logprobs of the prompt: rows that are no tokens have none: leave out echo with logprobs, or the "
            "rows",
            param="prompt",
        )
    if request.grammar is not None and options.token_texts is None:
        raise InvalidRequest("grammar: not supported by these stages: leave it out", param="grammar")
    request.sampling.require_vocabulary(options.n_vocab)


def session_ids(term: int) -> Iterator[int]:
    """Session ids of a coordinator, which no coordinator of another term uses.

    Windows of a former coordinator may still wait at a stage, or be on their way between two, when the next
    coordinator opens its first session.
    """
    return itertools.count(term * _IDS_PER_TERM + 1)
