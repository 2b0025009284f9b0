"""Tuning of a group's drafter while a model is served: in pauses of the load, on its recorded answers.

A thread looks after it: it begins a training when enough is new, has its process stand still while requests
run, judges what comes of it, and gives the group another drafter. The text of no answer depends on any of it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.serve.group_drafter import BASE
from mesh.status import TuningStatus
from mesh.tuning.answers import AnswerChoice, AnswerCounts
from mesh.tuning.background import IdleClock, ServedAcceptance, TuningBounds
from mesh.tuning.background_run import BackgroundRun
from mesh.tuning.jobs import Device, TuneJob
from mesh.tuning.recording import read_recording_header, told_within
from mesh.tuning.source import known_prompts
from mesh.tuning.tuned_folder import TunedDrafter, may_serve
from spanmesh_proto.errors import InvalidRequest, MeshError
from stages.gguf import read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from mesh.serve.group_drafter import GroupDrafter
    from mesh.serve.tuning_room import TuningRoom
    from mesh.tuning.background_run import RunResult

_TICK_S: Final = 0.5
# Files are looked through again after this time.
_COUNT_S: Final = 5.0
# While requests run it would only take time from them.
_QUIET_S: Final = 1.0
_SELDOM_S: Final = 60.0
_CLOSE_S: Final = 10.0

log = structlog.get_logger()


class BackgroundTuning:
    """The thread, and what the coordinator tells it; see `mesh.coordinator.tuning_plug.Tuning`.

    Args:
        room: What it works with.
        group: The drafter of the group.
        bounds: When a drafter is tuned.
        clock_s: Monotonic seconds.
        now_s: Wall clock, Unix seconds.
    """

    def __init__(
        self,
        room: TuningRoom,
        group: GroupDrafter,
        bounds: TuningBounds,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._room = room
        self._folder = room.tuned
        self._group = group
        self._bounds = bounds
        self._clock_s = clock_s
        self._now_s = now_s
        # Of the idle clock, the served acceptance and the run, which the event loop uses as well.
        self._guard = threading.Lock()
        self._idle = IdleClock()
        self._acceptance = ServedAcceptance(bounds.least_windows)
        self._run: BackgroundRun | None = None
        self._served: TunedDrafter | None = None
        self._base = ""
        self._latest_number = BASE
        self._counts = AnswerCounts(room.recording, read_recording_header(room.recording).shape)
        self._counted_s = -_SELDOM_S
        self._is_enough = False
        # Hashes of prompts that the served drafter has learned, once they are known.
        self._learned: frozenset[int] | None = None
        self._status = TuningStatus(group=room.group)
        self._others_busy: Callable[[], bool] = lambda: False
        self._wanted_back: queue.SimpleQueue[Future[None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._look_after, name="background tuning", daemon=True)
        self._thread.start()

    def came(self) -> None:
        """A request is about to begin, or can from now on: what computes stops."""
        with self._guard:
            self._idle.came(self._clock_s())
            if self._run is not None:
                self._run.stop()

    def began(self, session: Hashable) -> None:
        """A session runs, again perhaps."""
        with self._guard:
            self._idle.began(session, self._clock_s())

    def ended(self, session: Hashable) -> None:
        """A session runs no more."""
        with self._guard:
            self._idle.ended(session, self._clock_s())

    def drafted(self, proposer: str, *, is_accepted: bool) -> None:
        """The first token that a proposer drafted for a window was judged."""
        number = proposer.partition("/")[2]
        if number:
            with self._guard:
                self._acceptance.add(int(number), is_accepted=is_accepted)

    def status(self) -> TuningStatus:
        """Where it stands."""
        with self._guard:
            run, served = self._run, self._served
            state: Any = "waiting for idleness" if self._is_enough else "waiting for answers"
            if run is not None:
                state = "paused" if run.is_stopped else "tuning"
            status = replace(self._status, state=state, step=None if run is None else run.step)
            if served is not None:
                status.drafter = self._folder.file(served.number).name
                status.age_s = round(self._now_s() - served.time_s)
                status.gain = round(served.gain, 3)
                status.learned_tokens, status.learned_prompts = served.num_tokens, served.num_prompts
            return status

    async def go_back(self) -> TuningStatus:
        """Serve the group with the drafter before, and never again with that of now.

        Raises:
            InvalidRequest: If it is served with the base drafter.
        """
        done: Future[None] = Future()
        self._wanted_back.put(done)
        await asyncio.wrap_future(done)
        return self.status()

    def watch(self, are_busy: Callable[[], bool]) -> None:
        """Compute only while other models of this head are idle, too."""
        self._others_busy = are_busy

    def close(self) -> None:
        """End what computes; a training goes on at the next start."""
        self._wanted_back.put(None)
        self._thread.join(_CLOSE_S)

    def _look_after(self) -> None:
        with self._told():
            self._begin()
        while True:
            try:
                done = self._wanted_back.get(timeout=_TICK_S)
                if done is None:
                    break
                self._go_back_for(done)
            except queue.Empty:
                pass
            with self._told():
                self._look()
        if self._run is not None:
            self._run.end()

    def _begin(self) -> None:
        """Serve the latest tuned drafter, and go on with a training that was not over."""
        self._base = self._room.base_digest()
        found = self._folder.drafters()
        self._latest_number = max((each.number for each in found), default=BASE)
        self._serve_latest()
        for drafter in found:
            if not drafter.is_chosen and not self._resumed(drafter):
                self._folder.erase(drafter.number)

    def _resumed(self, drafter: TunedDrafter) -> bool:
        """Whether a training that was not over goes on."""
        output = self._folder.file(drafter.number)
        is_there = output.with_name(output.name + ".run").exists()
        is_of_now = self._may_serve(drafter) and drafter.source == self._group.number
        if self._run is None and is_there and is_of_now:
            self._start(drafter, is_resumed=True)
            return True
        return False

    def _may_serve(self, drafter: TunedDrafter) -> bool:
        return may_serve(drafter, self._base, self._room.group, self._room.members())

    def _serve_latest(self) -> None:
        """Serve the youngest drafter that can be; the base drafter if there is none."""
        for drafter in reversed(self._folder.drafters()):
            if drafter.is_chosen and self._may_serve(drafter) and self._is_served(drafter):
                return

    def _is_served(self, drafter: TunedDrafter) -> bool:
        """Load a drafter for the group; returns whether it drafts. One that does not is erased."""
        try:
            loaded = self._room.load(drafter.number)
        except MeshError as error:
            self._folder.erase(drafter.number)
            log.warning("tuned_drafter_unusable", number=drafter.number, reason=error.message)
            return False
        self._group.serve(drafter.number, loaded)
        self._note(drafter)
        log.info("tuned_drafter_served", group=self._room.group, number=drafter.number)
        return True

    def _look(self) -> None:
        self._group.close_former()
        served = self._served
        if served is not None:
            if not self._folder.has(served) or not self._may_serve(served):
                self._leave(served, "a key that it had learned from is of the group no more", at_once=True)
            elif not self._group.is_alive:
                self._leave(served, "its process ended")
            elif self._has_fallen(served):
                self._leave(served, "it was right less often than the drafter before")
        if self._run is None:
            self._consider()
        else:
            self._follow(self._run)

    def _has_fallen(self, served: TunedDrafter) -> bool:
        with self._guard:
            return self._acceptance.has_fallen(served.number, served.former_rate)

    def _leave(self, served: TunedDrafter, reason: str, *, at_once: bool = False) -> None:
        """Go back to the drafter before, and erase the one of now.

        Args:
            served: That of now.
            reason: Why.
            at_once: Whether running sessions go on without it.
        """
        self._end_run()
        self._group.serve(BASE, None)
        self._note(None)
        if at_once:
            self._group.close_former(at_once=True)
        self._folder.erase(served.number)
        self._serve_latest()
        self._tell(f"went back from {served.number:04d}: {reason}", gone_back=1)
        log.warning("tuned_drafter_left", number=served.number, reason=reason, serves=self._group.number)

    def _go_back_for(self, done: Future[None]) -> None:
        """Go back as an operator wants it."""
        if not done.set_running_or_notify_cancel():
            # Its client went away before.
            return
        try:
            if self._served is None:
                raise InvalidRequest(  # noqa: TRY301 - its waiter is told
                    "the group is served with the drafter that tuning began with: there is none before it"
                )
            self._leave(self._served, "an operator wanted it")
        except Exception as error:  # noqa: BLE001 - whatever it is, the waiter is to be told
            done.set_exception(error)
        else:
            done.set_result(None)

    def _consider(self) -> None:
        """Begin a training if enough is new, and nothing has run for a while."""
        now_s = self._clock_s()
        with self._guard:
            is_quiet = self._idle.idle_s(now_s) >= _QUIET_S
        if now_s >= self._counted_s + (_COUNT_S if is_quiet else _SELDOM_S):
            self._counted_s = now_s
            self._count()
        if not self._is_enough or not self._is_idle():
            return
        # What came or went meanwhile counts, too.
        choice = self._count()
        if not self._is_enough:
            return
        source = () if self._served is None else self._served.keys
        # Not that of a drafter that was erased: how often it was right must not count for another.
        number = max(self._latest_number + 1, self._folder.next_number())
        drafter = TunedDrafter(
            number=number,
            base=self._base,
            source=self._group.number,
            group=self._room.group,
            keys=tuple(sorted({*choice.keys, *source})),
            latest_s=choice.latest_s,
        )
        self._folder.write(drafter)
        self._latest_number = number
        self._start(drafter, is_resumed=False)

    def _count(self) -> AnswerChoice:
        """Note how much is new."""
        behind_s = self._folder.tried(self._base, self._room.group)
        found = self._counts.count(self._room.members(), behind_s)
        if self._learned is None:
            self._learned = known_prompts(read_header(self._room.file(self._group.number)))
        num_tokens, num_prompts = found.num_tokens, len(found.prompts - self._learned)
        bounds = self._bounds
        with self._guard:
            self._status.new_tokens, self._status.new_prompts = num_tokens, num_prompts
            self._is_enough = num_tokens >= bounds.least_tokens and num_prompts >= bounds.least_prompts
        return found.choice

    def _is_idle(self) -> bool:
        with self._guard:
            if self._others_busy():
                self._idle.came(self._clock_s())
            return self._is_idle_now()

    def _is_idle_now(self) -> bool:
        idle_s = self._idle.idle_s(self._clock_s())
        return idle_s > 0.0 and idle_s >= self._bounds.idle_s

    def _start(self, drafter: TunedDrafter, *, is_resumed: bool) -> None:
        job = TuneJob(
            folders=(self._room.recording,),
            target=self._room.options.model,
            drafter=self._room.file(drafter.source),
            output=self._folder.file(drafter.number),
            schedule=self._bounds.schedule,
            device=Device(),
            vocabulary=None,
            is_resumed=is_resumed,
            choice=AnswerChoice(frozenset(drafter.keys), drafter.latest_s),
            is_background=True,
        )
        log.info("tuning_begins", group=drafter.group, number=drafter.number, is_resumed=is_resumed)
        with self._guard:
            self._run = BackgroundRun(drafter, job)
            if not self._is_idle_now():
                self._run.stop()

    def _follow(self, run: BackgroundRun) -> None:
        """Let a training compute while nothing else does, and take what comes of it."""
        if not self._folder.has(run.drafter) or not self._may_serve(run.drafter):
            self._end_run()
            self._tell("ended: a key whose answers it learned is of the group no more", refused=1)
            return
        is_idle = self._is_idle()
        with self._guard:
            # A request may have come between the two.
            if is_idle and self._is_idle_now():
                run.go_on()
            else:
                run.stop()
        result = run.result()
        if isinstance(result, MeshError) and run.is_resumed:
            # Answers that it was learning may be gone: what is there now is learned anew.
            self._end_run()
            log.info("tuning_not_resumed", number=run.drafter.number, reason=result.message)
        elif isinstance(result, MeshError):
            self._refuse(run, result.message)
        elif result is not None and result.verdict.refusal is not None:
            self._refuse(run, result.verdict.refusal)
        elif result is not None and not self._group.has_former:
            # Otherwise three drafters would have to be in memory beside the base drafter.
            self._choose(run, result)

    def _refuse(self, run: BackgroundRun, reason: str) -> None:
        self._end_run()
        self._folder.note_tried(run.drafter)
        self._tell(f"{run.drafter.number:04d} was refused: {reason}", refused=1)
        log.info("tuned_drafter_refused", number=run.drafter.number, reason=reason)

    def _choose(self, run: BackgroundRun, result: RunResult) -> None:
        """Check a candidate, and give it to new sessions."""
        outcome, gain = result.outcome, result.verdict.gain
        with self._guard:
            former_rate = self._acceptance.rate(run.drafter.source)
        drafter = replace(
            run.drafter,
            is_chosen=True,
            num_tokens=outcome.num_learned,
            num_prompts=outcome.num_prompts,
            gain=0.0 if gain is None else gain.per_window.value,
            former_rate=former_rate,
            time_s=self._now_s(),
        )
        try:
            self._folder.choose(drafter, outcome.candidate)
        except MeshError as error:
            self._refuse(run, error.message)
            return
        self._folder.note_tried(drafter)
        with self._guard:
            self._run = None
        if self._is_served(drafter):
            self._folder.prune()
            self._tell(f"{drafter.number:04d} was chosen: {drafter.gain:+.3f} accepted a window", chosen=1)
        else:
            self._tell(f"{drafter.number:04d} was refused: it cannot draft", refused=1)

    def _end_run(self) -> None:
        """End a training, and erase what it has made."""
        with self._guard:
            run, self._run = self._run, None
        if run is not None:
            run.end()
            self._folder.erase(run.drafter.number)

    def _note(self, served: TunedDrafter | None) -> None:
        with self._guard:
            self._served = served
        self._learned = None
        self._counted_s = -_SELDOM_S

    def _tell(self, latest: str, *, chosen: int = 0, refused: int = 0, gone_back: int = 0) -> None:
        with self._guard:
            status = self._status
            status.latest = told_within(latest, self._room.recording)
            status.chosen += chosen
            status.refused += refused
            status.gone_back += gone_back

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What fails in the block is told once, and tried again later: no answer depends on it."""
        try:
            yield
        except MeshError as error:
            self._fail(error.message)
        except Exception as error:  # noqa: BLE001 - whatever it is, the group is served on
            self._fail(repr(error))

    def _fail(self, reason: str) -> None:
        if told_within(reason, self._room.recording) != self._status.latest:
            self._tell(reason)
            log.warning("background_tuning_failed", reason=reason)
