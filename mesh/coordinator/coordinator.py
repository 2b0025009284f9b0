"""Sessions over the ring: what `mesh serve` answers requests with."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.coordinator.generation import Generation, WindowPlan
from mesh.coordinator.ring import Ring, StageAddress
from mesh.coordinator.slots import SlotPool
from mesh.engine import Committed, GenerationRequest, GenerationStats
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import ContextLengthExceeded, InvalidRequest, MeshError, StageFailed, from_code
from speculative.gate import Gate
from speculative.statistics import SpeculationStatistics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from speculative.gate import GateAccount
    from speculative.proposer import Proposer

log = structlog.get_logger()

_MAX_PREFILL_CHUNKS_IN_FLIGHT: Final = 4


@dataclass(frozen=True)
class CoordinatorOptions:
    """How sessions run.

    Attributes:
        context_length: Positions of one session.
        num_slots: Sessions at once.
        max_waiting: Requests that may wait for a slot.
        max_rows: Most rows of one window.
        max_proposed: Most proposed tokens in one window.
    """

    context_length: int
    num_slots: int
    max_rows: int
    max_waiting: int = 64
    max_proposed: int = 8


@dataclass(frozen=True)
class _Answer:
    """A verdict, and when it came: a client that reads slowly is not the ring's delay."""

    tokens: tuple[int, ...]
    arrived_s: float


@dataclass
class _Session:
    """One running request, as the coordinator's callbacks see it."""

    id: int
    epoch: int = 0
    next_window_id: int = 0
    verdicts: asyncio.Queue[_Answer | MeshError] = field(default_factory=asyncio.Queue)


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
        make_proposer: Gives each request its proposer; None for plain decoding.
        clock_s: Monotonic, seconds.
    """

    def __init__(
        self,
        stages: Sequence[StageAddress],
        options: CoordinatorOptions,
        *,
        mesh_id: str,
        mesh_key: str,
        make_proposer: Callable[[], Proposer] | None,
        clock_s: Callable[[], float],
    ) -> None:
        self._stages = tuple(stages)
        self._options = options
        self._make_proposer = make_proposer
        self._clock_s = clock_s
        self._slots = SlotPool(options.num_slots, options.max_waiting)
        self._sessions: dict[int, _Session] = {}
        self._session_ids = itertools.count(1)
        self._lost: MeshError | None = None
        self._totals = [_StageTotals() for _ in stages]
        self._speculation = SpeculationStatistics()
        self._gate_account: GateAccount | None = None
        self._ring = Ring(
            self._stages,
            mesh_id,
            mesh_key,
            on_verdict=self._on_verdict,
            on_failure=self._on_failure,
            on_lost=self._on_lost,
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
            InvalidRequest: If the prompt is empty or no token is wanted.
            ContextLengthExceeded: If prompt + 1 exceeds the context.
            Overloaded: If the waiting line is full.
            StageFailed: If a stage failed or went away.
        """
        self._check(request)
        async with self._slots.hold() as slot:
            self._raise_if_lost()
            session = _Session(next(self._session_ids))
            self._sessions[session.id] = session
            try:
                self._ring.open_session(_open_message(session.id, slot, request))
                async for committed in self._run(session, request):
                    yield committed
            finally:
                del self._sessions[session.id]
                self._ring.close_session(session.id)

    def status(self) -> dict[str, Any]:
        """For `mesh status`: stages with their mean times, sessions, speculation."""
        return {
            "ready": self.is_ready,
            "lost": self._lost.message if self._lost else None,
            "sessions": {
                "running": self._slots.num_busy,
                "waiting": self._slots.num_waiting,
                "slots": self._options.num_slots,
            },
            "speculation": {
                "proposer": "ngram" if self._make_proposer else "off",
                "windows": self._speculation.num_windows,
                "proposed": self._speculation.num_proposed,
                "accepted": self._speculation.num_accepted,
                "tokens_per_window": round(self._speculation.mean_committed, 3),
                "acceptance_per_position": [
                    round(share, 3) for share in self._speculation.acceptance_per_position()
                ],
            },
            "stages": [
                {
                    "index": index,
                    "host": stage.host,
                    "address": stage.address,
                    "layers": [stage.layers.start, stage.layers.stop],
                    "windows": totals.num_windows,
                    "mean_compute_ms": _mean_ms(totals.compute_us, totals.num_windows),
                    "mean_queue_ms": _mean_ms(totals.queue_us, totals.num_windows),
                }
                for index, (stage, totals) in enumerate(zip(self._stages, self._totals, strict=True))
            ],
        }

    async def _run(self, session: _Session, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        generation = Generation(
            request,
            context_length=self._options.context_length,
            max_rows=self._options.max_rows,
            max_proposed=self._options.max_proposed,
            proposer=self._make_proposer() if self._make_proposer else None,
        )
        # A new session starts with what the last one learned about the ring, not about its text.
        gate = Gate(prior=self._gate_account)
        started_s = self._clock_s()
        window, answer = await self._prefill(session, generation)
        step = generation.commit(window, answer.tokens)
        first_token_s = answer.arrived_s
        stats = GenerationStats(prefill_ms=(first_token_s - started_s) * 1000)
        while step.finish is None:
            decision = gate.decide(generation.max_width)
            # The next window leaves before the client hears of this one: the ring never waits for HTTP.
            window = generation.next_window(decision.width)
            sent_s = self._clock_s()
            self._send(session, window)
            yield Committed(step.judgement.committed, None, stats)
            answer = await self._verdict(session)
            step = generation.commit(window, answer.tokens)
            judgement = step.judgement
            if judgement.is_rejected:
                session.epoch += 1
            gate.record(judgement.num_proposed, len(judgement.committed), (answer.arrived_s - sent_s) * 1000)
            self._gate_account = gate.account
            self._speculation = self._speculation.add(judgement)
            stats = replace(
                stats,
                num_windows=stats.num_windows + 1,
                num_proposed=stats.num_proposed + judgement.num_proposed,
                num_accepted=stats.num_accepted + judgement.num_accepted,
                decode_ms=(answer.arrived_s - first_token_s) * 1000,
            )
        yield Committed(step.judgement.committed, step.finish, stats)

    async def _prefill(self, session: _Session, generation: Generation) -> tuple[WindowPlan, _Answer]:
        """Ship the prompt's chunks one behind the other; the last one's verdict is the first token."""
        in_flight: deque[WindowPlan] = deque()
        for window in generation.prefill():
            if len(in_flight) >= _MAX_PREFILL_CHUNKS_IN_FLIGHT:
                await self._verdict(session)
                in_flight.popleft()
            self._send(session, window)
            in_flight.append(window)
        while len(in_flight) > 1:
            await self._verdict(session)
            in_flight.popleft()
        return in_flight[0], await self._verdict(session)

    def _send(self, session: _Session, window: WindowPlan) -> None:
        self._ring.send(
            wire.Window(
                session=session.id,
                epoch=session.epoch,
                id=session.next_window_id,
                start=window.start,
                tokens=window.tokens,
                verify_rows=window.num_verified,
            )
        )
        session.next_window_id += 1

    @staticmethod
    async def _verdict(session: _Session) -> _Answer:
        answer = await session.verdicts.get()
        if isinstance(answer, MeshError):
            raise answer
        return answer

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
        self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise StageFailed(self._lost.message, retry_after_s=10)

    def _on_verdict(self, verdict: wire.Verdict) -> None:
        for totals, time in zip(self._totals, verdict.times, strict=False):
            totals.num_windows += 1
            totals.queue_us += time.queue_us
            totals.compute_us += time.compute_us
        session = self._sessions.get(verdict.session)
        if session is not None and verdict.epoch == session.epoch:
            session.verdicts.put_nowait(_Answer(tuple(verdict.tokens), self._clock_s()))

    def _on_failure(self, stage_index: int, failure: wire.Failure) -> None:
        error = from_code(failure.code, f"stage {stage_index}: {failure.message}")
        if failure.session == 0:
            self._on_lost(error)
        elif (session := self._sessions.get(failure.session)) is not None:
            session.verdicts.put_nowait(error)

    def _on_lost(self, reason: MeshError) -> None:
        self._lost = self._lost or reason
        for session in self._sessions.values():
            session.verdicts.put_nowait(StageFailed(reason.message, retry_after_s=10))


def _open_message(session: int, slot: int, request: GenerationRequest) -> wire.Open:
    sampling = request.sampling
    return wire.Open(
        session=session,
        slot=slot,
        sampling=wire.Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
        ),
    )


def _mean_ms(total_us: int, count: int) -> float:
    return round(total_us / count / 1000, 3) if count else 0.0
