"""A ring of stages in simulated time: links, staircases t(k), windows in flight, cancels, shared cores.

The coordinator's part is played as `mesh.coordinator` plays it: a verdict is judged, the next window leaves
at once, and whenever a proposer knows more the controller is asked again. Texts are positions: token `p` is
right at position `p`, anything else is wrong there.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from speculative.acceptance import ProposalContext, StageMeasure, WindowOutcome, judge, judge_unread
from speculative.controller import Controller, ControllerOptions, SharedMeasures
from speculative.proposer import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WRONG = -1


@dataclass(frozen=True)
class RingShape:
    """What is simulated."""

    staircase_ms: tuple[float, ...] = (4.0, 7.5, 10.4, 12.8, 16.8, 19.2)
    """Entry `k - 1`: what a stage computes on a batch of `k` rows with a core to itself; the last step's
    height goes on beyond."""
    num_stages: int = 3
    """How many such stages."""
    one_way_ms: float = 5.0
    """Each hop, and each control message."""
    overhead_ms: float = 0.3
    """Around each batch, on top of computing: waking, serialising."""
    num_cores: int | None = None
    """Cores that stages and drafters share; None gives each its own."""
    draft_ms: float = 6.0
    """Core time of a drafted token."""
    jitter: float = 0.1
    """Computing takes up to this share more or less, drawn anew for each batch."""

    def compute_ms(self, num_rows: int) -> float:
        stairs = self.staircase_ms
        if num_rows <= len(stairs):
            return stairs[num_rows - 1]
        slope = stairs[-1] - stairs[-2] if len(stairs) > 1 else stairs[0]
        return stairs[-1] + slope * (num_rows - len(stairs))


@dataclass
class Text:
    """What each proposer would say at each position, drawn beforehand."""

    lookups: Sequence[tuple[tuple[float, ...], int]] = ()
    """Entry `p`: the confidences of a free look-up's tokens from `p` on, and how many are right."""
    drafts: Sequence[tuple[float, bool]] | None = None
    """Entry `p`: how sure the draft model is there, and whether it is right; None without one."""


@dataclass
class _Job:
    left_ms: float
    done: Callable[[], None]


class Machine:
    """Events in time, and jobs that share cores fairly."""

    def __init__(self, num_cores: int | None) -> None:
        self.now_ms = 0.0
        self._num_cores = num_cores
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._jobs: list[_Job] = []

    def at(self, delay_ms: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_ms + delay_ms, next(self._order), act))

    def compute(self, work_ms: float, done: Callable[[], None]) -> None:
        self._jobs.append(_Job(max(work_ms, 1e-6), done))

    def run(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            speed = 1.0 if self._num_cores is None else min(1.0, self._num_cores / max(1, len(self._jobs)))
            next_job = min(self._jobs, key=lambda job: job.left_ms, default=None)
            job_ms = self.now_ms + next_job.left_ms / speed if next_job else float("inf")
            event_ms = self._events[0][0] if self._events else float("inf")
            moment = min(job_ms, event_ms)
            assert moment < float("inf"), "the ring stands still"
            for job in self._jobs:
                job.left_ms -= (moment - self.now_ms) * speed
            self.now_ms = moment
            if next_job is not None and job_ms <= event_ms:
                self._jobs.remove(next_job)
                next_job.done()
            else:
                heapq.heappop(self._events)[2]()


@dataclass
class _Window:
    session: SimulatedSession
    epoch: int
    tokens: tuple[int, ...]
    start: int
    proposal: Proposal
    sent_ms: float
    num_ahead: int
    arrived_ms: float = 0.0
    measures: list[StageMeasure] = field(default_factory=list)


class _Stage:
    def __init__(self, ring: Ring, index: int) -> None:
        self._ring = ring
        self._index = index
        self._queue: deque[_Window] = deque()
        self._is_busy = False
        self.epochs: dict[int, int] = {}

    def put(self, window: _Window) -> None:
        window.arrived_ms = self._ring.machine.now_ms
        key = id(window.session)
        self.epochs[key] = max(self.epochs.get(key, 0), window.epoch)
        self._queue.append(window)
        self.work()

    def work(self) -> None:
        if self._is_busy:
            return
        batch: list[_Window] = []
        waiting: deque[_Window] = deque()
        seen: set[int] = set()
        for window in self._queue:
            if window.epoch < self.epochs[id(window.session)]:
                continue
            if id(window.session) in seen:
                waiting.append(window)
            else:
                batch.append(window)
            seen.add(id(window.session))
        self._queue = waiting
        if batch:
            self._is_busy = True
            num_rows = sum(len(window.tokens) for window in batch)
            started_ms = self._ring.machine.now_ms
            shape = self._ring.shape
            work_ms = shape.compute_ms(num_rows) * self._ring.wobble() + shape.overhead_ms
            self._ring.machine.compute(work_ms, lambda: self._done(batch, num_rows, started_ms))

    def _done(self, batch: list[_Window], num_rows: int, started_ms: float) -> None:
        ring = self._ring
        self._is_busy = False
        for window in batch:
            compute_ms = ring.machine.now_ms - started_ms
            window.measures.append(StageMeasure(num_rows, started_ms - window.arrived_ms, compute_ms))
            if self._index + 1 < len(ring.stages):
                following = ring.stages[self._index + 1]
                ring.machine.at(ring.shape.one_way_ms, partial(following.put, window))
            else:
                ring.machine.at(ring.shape.one_way_ms, partial(window.session.judge, window))
        self.work()


class Ring:
    """Stages and links."""

    def __init__(self, shape: RingShape) -> None:
        self.shape = shape
        self.machine = Machine(shape.num_cores)
        self.stages = [_Stage(self, index) for index in range(shape.num_stages)]
        self.sessions: set[int] = set()
        self.is_drafting = False
        self.draft_line: deque[Callable[[], None]] = deque()
        self._dice = random.Random(7)

    def wobble(self) -> float:
        return 1.0 + self.shape.jitter * self._dice.uniform(-1.0, 1.0)

    def send(self, window: _Window) -> None:
        self.machine.at(self.shape.one_way_ms, lambda: self.stages[0].put(window))

    def cancel(self, session: SimulatedSession, epoch: int) -> None:
        def void(stage: _Stage) -> None:
            stage.epochs[id(session)] = max(stage.epochs.get(id(session), 0), epoch)

        for stage in self.stages:
            self.machine.at(self.shape.one_way_ms, partial(void, stage))

    def draft(self, done: Callable[[], None]) -> None:
        """One draft thread for all sessions."""
        self.draft_line.append(done)
        self._draft_next()

    def _draft_next(self) -> None:
        if not self.is_drafting and self.draft_line:
            self.is_drafting = True
            self.machine.compute(self.shape.draft_ms * self.wobble(), self._drafted)

    def _drafted(self) -> None:
        self.is_drafting = False
        self.draft_line.popleft()()
        self._draft_next()


class SimulatedSession:
    """One answer; see `mesh.coordinator.session` for what it imitates."""

    DRAFT_AHEAD = 8

    def __init__(self, ring: Ring, text: Text, num_tokens: int, controller: Controller | None) -> None:
        self._ring = ring
        self._text = text
        self._num_tokens = num_tokens
        self._controller = controller
        self.position = 0  # of the latest committed token
        self._epoch = 0
        self._flights: deque[_Window] = deque()
        self.started_ms = ring.machine.now_ms
        self.finished_ms: float | None = None
        self.widths: list[int] = []
        self.num_rows = 0
        # The draft's own line of tokens behind the committed one, and until where it drafts.
        self._drafted: list[int] = []
        self._draft_until = 0
        self._is_drafting = False

    def start(self) -> None:
        self.started_ms = self._ring.machine.now_ms
        self._ring.sessions.add(id(self))
        self._send_on()

    @property
    def is_over(self) -> bool:
        return self.finished_ms is not None

    @property
    def _ahead(self) -> list[int]:
        tokens = [token for window in self._flights for token in window.proposal.tokens]
        return tokens[1:] if self._flights and self._flights[0].num_ahead else tokens

    def judge(self, window: _Window) -> None:
        if self.is_over or window.epoch != self._epoch:
            return
        assert self._flights.popleft() is window
        now_ms = self._ring.machine.now_ms
        proposed = window.tokens[1:]
        sampled: list[int] = []
        for index in range(len(window.tokens)):
            sampled.append(window.start + index + 1)
            if index < len(proposed) and proposed[index] != sampled[-1]:
                break
        judgement = judge(
            proposed,
            sampled,
            num_confirmed=int(window.num_ahead > 0),
            max_committed=self._num_tokens - self.position,
        )
        self.position += len(judgement.committed)
        self._correct_draft(judgement.committed)
        is_over = self.position >= self._num_tokens
        voided: list[_Window] = []
        goes_on = not self._flights or self._flights[0].tokens[0] == self.position
        if judgement.is_rejected or not goes_on or is_over:
            voided = list(self._flights)
            self._flights.clear()
        if voided or judgement.is_rejected:
            self._epoch += 1
        if voided:
            self._ring.cancel(self, self._epoch)
        if self._controller is not None:
            self._controller.landed(is_void=bool(voided))
            self._controller.judged(
                WindowOutcome(
                    judgement,
                    window.proposal,
                    window.start,
                    window.sent_ms,
                    now_ms,
                    window.num_ahead,
                    tuple(window.measures),
                    len(voided),
                    len(self._flights),
                )
            )
            if voided and not judgement.is_rejected and not is_over:
                unread = voided[0]
                self._controller.judged(
                    WindowOutcome(
                        judge_unread(len(unread.tokens)),
                        unread.proposal,
                        unread.start,
                        unread.sent_ms,
                        now_ms,
                        unread.num_ahead,
                        (),
                        len(voided) - 1,
                        0,
                    )
                )
        if is_over:
            self.finished_ms = now_ms
            self._ring.sessions.discard(id(self))
            if self._controller is not None:
                self._controller.close()
        else:
            self._send_on()

    def _send_on(self) -> None:
        if not self._flights:
            self._send(self._next_proposal())
        self._pump()

    def _pump(self) -> None:
        if self._controller is None or self.is_over:
            return
        while (proposal := self._next_proposal()).tokens:
            self._send(proposal)

    def _next_proposal(self) -> Proposal:
        controller = self._controller
        room = self._num_tokens - self.position - len(self._ahead) - 1
        if controller is None or room < 1:
            return EMPTY
        context = ProposalContext(
            now_ms=self._ring.machine.now_ms,
            num_in_flight=len(self._flights),
            position=self.position,
            room=min(room, 62),
            num_sessions=len(self._ring.sessions),
        )
        wanted = min(controller.wanted(context), context.room)
        if wanted < 1:
            return EMPTY
        proposal = self._propose(wanted)
        decision = controller.decide(context, proposal)
        assert 0 <= decision.width <= context.room
        return proposal.first(decision.width)

    def _propose(self, max_tokens: int) -> Proposal:
        ahead = self._ahead
        is_on_track = all(token == self.position + index for index, token in enumerate(ahead, 1))
        begin = self.position + len(ahead) + 1
        if begin < len(self._text.lookups):
            confidences, num_right = self._text.lookups[begin]
            if confidences:
                num_right = num_right if is_on_track else 0
                confidences = confidences[:max_tokens]
                tokens = [begin + i if i < num_right else WRONG for i in range(len(confidences))]
                self._follow(ahead)
                return Proposal(tuple(tokens), confidences, "ngram")
        if self._text.drafts is None:
            return EMPTY
        self._follow(ahead)
        self._draft_until = len(ahead) + max(max_tokens, self.DRAFT_AHEAD)
        ready = self._drafted[len(ahead) : len(ahead) + max_tokens]
        self._draft()
        drafts = self._text.drafts
        sure = tuple(drafts[min(begin + i, len(drafts) - 1)][0] for i in range(len(ready)))
        return Proposal(tuple(ready), sure, "draft")

    def _follow(self, tokens: Sequence[int]) -> None:
        if self._drafted[: len(tokens)] != list(tokens):
            self._drafted = list(tokens)

    def _correct_draft(self, committed: Sequence[int]) -> None:
        if self._drafted[: len(committed)] == list(committed):
            del self._drafted[: len(committed)]
        else:
            self._drafted = []
        self._draft_until -= len(committed)

    def _draft(self) -> None:
        if self._is_drafting or self.is_over or len(self._drafted) >= self._draft_until:
            return
        self._is_drafting = True
        base, known = self.position, list(self._drafted)

        def done() -> None:
            self._is_drafting = False
            drafts = self._text.drafts
            assert drafts is not None
            shift = self.position - base
            is_same = known[:shift] == list(range(base + 1, self.position + 1))[: len(known)]
            if is_same and self._drafted == known[shift:] and shift <= len(known):
                place = self.position + len(self._drafted) + 1
                is_on_track = all(t == self.position + i for i, t in enumerate(self._drafted, 1))
                is_right = drafts[min(place, len(drafts) - 1)][1]
                self._drafted.append(place if is_right and is_on_track else WRONG)
                self._draft()
                self._pump()
            else:
                self._draft()

        self._ring.draft(done)

    def _send(self, proposal: Proposal) -> None:
        is_behind = bool(self._flights)
        tokens = proposal.tokens if is_behind else (self.position, *proposal.tokens)
        start = self._flights[-1].start + len(self._flights[-1].tokens) if is_behind else self.position
        window = _Window(
            self, self._epoch, tokens, start, proposal, self._ring.machine.now_ms, len(self._flights)
        )
        self.widths.append(len(proposal.tokens))
        self.num_rows += len(tokens)
        self._flights.append(window)
        self._ring.send(window)


@dataclass(frozen=True)
class Run:
    """What a simulation came to."""

    elapsed_ms: float
    """From the first session's start to the last one's end."""
    tokens_per_s: float
    """All sessions' tokens over it."""
    sessions: tuple[SimulatedSession, ...]
    """Those that ran."""


def simulate(
    shape: RingShape,
    texts: Sequence[Text],
    *,
    options: ControllerOptions | None,
    shared: SharedMeasures | None = None,
    num_tokens: int = 128,
    stagger_ms: float = 15.0,
) -> Run:
    """Sessions that start one soon after the other, one for each text; plain decoding without `options`."""
    ring = Ring(shape)
    shared = shared or SharedMeasures()
    if any(text.drafts is not None for text in texts):
        shared.timing.draft_ms_per_token = shape.draft_ms
    sessions = [
        SimulatedSession(ring, text, num_tokens, Controller(options, shared) if options else None)
        for text in texts
    ]
    for session in sessions:
        ring.sessions.add(id(session))
    for index, session in enumerate(sessions):
        ring.machine.at(index * stagger_ms, session.start)
    ring.machine.run(lambda: all(session.is_over for session in sessions))
    return Run(ring.machine.now_ms, len(sessions) * num_tokens / ring.machine.now_ms * 1000, tuple(sessions))
