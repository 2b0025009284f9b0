"""Sessions over the ring: what `mesh serve` answers requests with."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from mesh.coordinator.generation import Generation
from mesh.coordinator.grouping import Grouping
from mesh.coordinator.guarded_proposer import GuardedProposer
from mesh.coordinator.limits import narrowed
from mesh.coordinator.prefill_pace import PrefillPace
from mesh.coordinator.ring import Ring, StageAddress
from mesh.coordinator.session import Session
from mesh.coordinator.slots import SlotPool
from mesh.coordinator.speculator import Speculator
from mesh.speculation_report import SpeculationReport
from spanmesh_proto.errors import ContextLengthExceeded, InvalidRequest, MeshError, StageFailed, from_code
from speculative.controller import ControllerOptions, SharedMeasures
from stages.opening import Opening
from stages.wakefulness import Wakefulness

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from mesh.coordinator.kept_prefixes import Beginning
    from mesh.engine import Committed, GenerationRequest
    from spanmesh_proto import windows_pb2 as wire
    from speculative.controller import Outcome
    from speculative.proposer import Proposer
    from stages.identity import Identity

log = structlog.get_logger()


@dataclass(frozen=True)
class CoordinatorOptions:
    """How sessions run.

    Attributes:
        context_length: Positions of one session.
        num_slots: Sessions at once.
        max_rows: Most rows of one window.
        n_vocab: Token ids are below this.
        max_waiting: Requests that may wait for a slot; at least 1.
        controller: Limits of speculation, and switches that take parts of it away.
        cancels: Whether stages are told at once of windows that a rejection voided; without, they learn it
            from the next window.
    """

    context_length: int
    num_slots: int
    max_rows: int
    n_vocab: int
    max_waiting: int = 64
    controller: ControllerOptions = field(default_factory=ControllerOptions)
    cancels: bool = True


@dataclass
class _StageTotals:
    """Times of one stage, summed over verdicts."""

    num_windows: int = 0
    queue_us: int = 0
    compute_us: int = 0


class Coordinator:
    """Holds no layers: opens sessions, ships windows, commits verdicts. Implements `mesh.engine.Engine`.

    Args:
        stages: Where the stages serve, in pipeline order.
        options: How sessions run.
        mesh_id: Which mesh they belong to.
        mesh_key: Shared by all stages and the coordinator.
        make_proposers: Gives each request its proposers, cheapest first, or none for plain decoding.
        clock_s: Monotonic, seconds.
        identity: What it shows the stages; None if all are in its own process.
    """

    def __init__(
        self,
        stages: Sequence[StageAddress],
        options: CoordinatorOptions,
        *,
        mesh_id: str,
        mesh_key: str,
        make_proposers: Callable[[GenerationRequest], Sequence[Proposer]] | None,
        clock_s: Callable[[], float],
        identity: Identity | None = None,
    ) -> None:
        self._stages = tuple(stages)
        self._options = options
        self._make_proposers = make_proposers
        self._clock_s = clock_s
        self._slots = SlotPool(options.num_slots, options.max_waiting, clock_s)
        self._sessions: dict[int, Session] = {}
        self._session_ids = itertools.count(1)
        self._lost: MeshError | None = None
        self._totals = [_StageTotals() for _ in stages]
        self._past = SpeculationReport()
        self._shared = SharedMeasures()
        self._wakefulness = Wakefulness()
        self._prefill_pace = PrefillPace(len(self._stages), options.max_rows)
        self._grouping = Grouping(len(self._stages))
        self._ring = Ring(
            self._stages,
            mesh_id,
            mesh_key,
            on_verdict=self._on_verdict,
            on_failure=self._on_failure,
            on_lost=self._on_lost,
            identity=identity,
        )

    @property
    def context_length(self) -> int:
        """Positions that one session may use, prompt and answer together."""
        return self._options.context_length

    @property
    def is_ready(self) -> bool:
        """Whether every stage is connected."""
        return self._lost is None

    async def start(self) -> None:
        """Connect to every stage.

        Raises:
            HostUnreachable: Naming the address that does not answer.
            ProtocolError: If a stage speaks another version or holds other layers than planned.
        """
        await self._ring.open()

    async def stop(self) -> None:
        """Fail what still runs and disconnect."""
        self._on_lost(StageFailed("the server is shutting down"))
        await self._ring.close()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """Continue the prompt. Closing the generator frees the session at every stage.

        Raises:
            InvalidRequest: If the prompt is empty, no token is wanted, or a biased token does not exist.
            ContextLengthExceeded: If prompt + 1 exceeds the context.
            Overloaded: If the waiting line has no place for it.
            StageFailed: If a stage failed or went away.
        """
        self._check(request)
        prompt = request.prompt if request.uses_cache else ()
        async with self._slots.hold(prompt, request.client) as beginning:
            self._raise_if_lost()
            session = self._session(request, beginning.num_cached)
            self._sessions[session.id] = session
            self._note_sessions()
            try:
                self._ring.open_session(_opening(session.id, beginning, request).to_wire())
                session.start(request.prompt)
                part = await session.next_part()
                # Others may begin with the same prompt while this one still runs.
                self._slots.prefixes.keep(beginning.slot, request.client, request.prompt)
                yield part
                while part.finish is None:
                    part = await session.next_part()
                    yield part
            finally:
                if session.is_failed:
                    self._slots.prefixes.forget(beginning.slot)
                else:
                    self._slots.prefixes.keep(beginning.slot, request.client, session.computed)
                del self._sessions[session.id]
                self._note_sessions()
                self._ring.close_session(session.id)
                session.close()
                self._past = self._past.merge(session.telemetry.report())

    def status(self) -> dict[str, Any]:
        """For `mesh status`: stages with their mean times, sessions, speculation."""
        return {
            "ready": self.is_ready,
            "lost": self._lost.message if self._lost else None,
            "sessions": {
                "running": self._slots.num_busy,
                "waiting": self._slots.num_waiting,
                "paused": len(self._sessions) - self._num_moving(),
                "slots": self._options.num_slots,
            },
            "speculation": self._report().as_dict(),
            "stages": [
                {
                    "index": index,
                    "host": stage.host,
                    "address": stage.address,
                    "layers": [stage.layers.start, stage.layers.stop],
                    "wire": str(stage.wire) if index + 1 < len(self._stages) else None,
                    "windows": totals.num_windows,
                    "mean_compute_ms": _mean_ms(totals.compute_us, totals.num_windows),
                    "mean_queue_ms": _mean_ms(totals.queue_us, totals.num_windows),
                }
                for index, (stage, totals) in enumerate(zip(self._stages, self._totals, strict=True))
            ],
        }

    def _note_sessions(self) -> None:
        self._wakefulness.update(len(self._sessions))
        self._grouping.set_num_sessions(len(self._sessions))

    async def stage_stats(self) -> list[wire.StageStats]:
        """What every stage counts itself, in order.

        Raises:
            TimeoutError: If one does not answer in time.
        """
        return await self._ring.stats()

    def _session(self, request: GenerationRequest, num_cached: int) -> Session:
        id = next(self._session_ids)  # noqa: A001 - an id is called id
        options = self._options
        return Session(
            id,
            Generation(
                request,
                context_length=options.context_length,
                max_rows=options.max_rows,
                num_cached=num_cached,
            ),
            self._ring,
            self._prefill_pace,
            self._grouping,
            speculator=self._speculator(id, request),
            cancels=options.cancels,
            has_logprobs=request.num_top_logprobs is not None,
            clock_ms=self._clock_ms,
            on_plain=None if self._make_proposers is None else self._learn_plain,
        )

    def _learn_plain(self, outcome: Outcome) -> None:
        if len(self._sessions) == 1:
            self._shared.add_plain(outcome)

    def _speculator(self, session: int, request: GenerationRequest) -> Speculator | None:
        controller = narrowed(self._options.controller, request.speculation)
        if self._make_proposers is None or controller is None:
            return None
        try:
            proposers = self._make_proposers(request)
        except Exception as error:  # noqa: BLE001 - an answer without speculation is an answer
            log.warning("speculation_switched_off", session=session, reason=repr(error))
            return None
        if not proposers:
            return None
        return Speculator(
            [GuardedProposer(each, n_vocab=self._options.n_vocab, session=session) for each in proposers],
            controller,
            self._shared,
            end_tokens=request.end_tokens,
            num_sessions=self._num_moving,
            clock_ms=self._clock_ms,
        )

    def _num_moving(self) -> int:
        """Sessions that send windows: one that waits for its reader takes nothing from the others."""
        return sum(not session.is_paused for session in self._sessions.values())

    def _report(self) -> SpeculationReport:
        """What speculation did so far, in the sessions that run as well."""
        report = self._past
        for session in self._sessions.values():
            report = report.merge(session.telemetry.report())
        return report

    def _clock_ms(self) -> float:
        return self._clock_s() * 1000

    def _check(self, request: GenerationRequest) -> None:
        if not request.prompt:
            raise InvalidRequest("the prompt is empty: send at least one token", param="prompt")
        if request.max_tokens < 1:
            raise InvalidRequest(
                f"max_tokens is {request.max_tokens}; ask for at least 1", param="max_tokens"
            )
        if len(request.prompt) + 1 > self._options.context_length:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt)} tokens; the context served is "
                f"{self._options.context_length}, and the answer needs at least 1: shorten the prompt or "
                "serve with a larger --ctx-size"
            )
        request.sampling.require_vocabulary(self._options.n_vocab)
        self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise StageFailed(self._lost.message, retry_after_s=10)

    def _on_verdict(self, verdict: wire.Verdict) -> None:
        session = self._sessions.get(verdict.session)
        if session is not None:
            try:
                session.on_verdict(verdict)
            except Exception as error:
                # The stream of verdicts serves all sessions: none may end it.
                log.exception("session_failed", session=session.id)
                session.fail(StageFailed(f"the coordinator failed on a verdict: {error!r}"))
        for totals, time in zip(self._totals, verdict.times, strict=False):
            totals.num_windows += 1
            totals.queue_us += time.queue_us
            totals.compute_us += time.compute_us

    def _on_failure(self, stage_index: int, failure: wire.Failure) -> None:
        error = from_code(failure.code, f"stage {stage_index}: {failure.message}")
        if failure.session == 0:
            self._on_lost(error)
        elif (session := self._sessions.get(failure.session)) is not None:
            session.on_failure(failure.epoch, error)

    def _on_lost(self, reason: MeshError) -> None:
        self._lost = self._lost or reason
        for session in self._sessions.values():
            session.fail(StageFailed(reason.message, retry_after_s=10))


def _opening(session: int, beginning: Beginning, request: GenerationRequest) -> Opening:
    return Opening(
        session,
        beginning.slot,
        request.sampling,
        len(request.prompt),
        request.num_top_logprobs,
        request.prompt[: beginning.num_cached],
        beginning.source_slot,
    )


def _mean_ms(total_us: int, count: int) -> float:
    return round(total_us / count / 1000, 3) if count else 0.0
