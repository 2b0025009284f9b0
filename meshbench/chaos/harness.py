"""Test bed of `mesh bench chaos`: a mesh and clients under faults, and its recovery."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog

from meshbench.chaos.fault_kinds import FaultKind
from meshbench.chaos.faults import FaultInjector
from meshbench.chaos.questions import questions, short_question
from meshbench.chaos.results import (
    Repair,
    account_of,
    events_of,
    pauses_s,
    probe_outcome,
    silence_s,
    tally,
)
from meshbench.load_client.hang_ups import NO_HANG_UPS, HangUps
from meshbench.load_client.schedule import Schedule
from meshbench.stress.checks import Expected
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from meshbench.chaos.faults import Fault, InjectedFault
    from meshbench.chaos.options import ChaosOptions
    from meshbench.chaos.questions import Question
    from meshbench.chaos.results import HeadLogAccount, Tally
    from meshbench.lab.network import Lab
    from meshbench.lab.systems import MeshSystem
    from meshbench.load_client.answers import AnswerRecord
    from meshbench.load_client.client import LoadClient, MeshSnapshot, RunningLoad

_POLL_S: Final = 0.5
# A mesh that is whole for a moment only, before it has noticed a loss, is not whole.
_SETTLE_S: Final = 1.5
ANSWERS_TIMEOUT_S: Final = 300.0
# A stream that a repair does not bring back within this has failed.
_STREAM_TIMEOUT_S: Final = 180.0
_PROBE_TIMEOUT_S: Final = 200.0
# Within this a fault shows, if only by streams that stand still.
_SHOWS_S: Final = 1.0
FOLDER: Final = "first-failure"

log = structlog.get_logger()


@dataclass(frozen=True)
class FaultTestBed:
    """Up, with every question answered once."""

    lab: Lab
    """Host 0 is the head, `host1` and so on take part."""
    mesh: MeshSystem
    """On it."""
    client: LoadClient
    """Sends the clients' requests."""
    injector: FaultInjector
    """Injects faults."""
    options: ChaosOptions
    """Options of the run."""
    questions: tuple[Question, ...]
    """Questions of the clients."""
    expected: Mapping[str, Expected]
    """What each was answered, by its id."""

    @property
    def num_hosts(self) -> int:
        """That take part, the head apart."""
        return self.lab.num_hosts - 1

    def start_all(self) -> RunningLoad:
        """Begin to send every question once."""
        return self.client.start(self._once(self.questions))

    def keep_asking(self, hang_ups: HangUps = NO_HANG_UPS) -> RunningLoad:
        """Begin to send questions over and over, until the load is ended; some clients may hang up."""
        return self.client.start(replace(self._once(self.questions), num_requests=None, hang_ups=hang_ups))

    def probe(self, question: Question) -> RunningLoad:
        """Begin to send one more question."""
        return self.client.start(self._once((question,)))

    def snapshot(self) -> MeshSnapshot:
        """Current state of mesh and clients; raises MeshError if the clients' process does not answer."""
        return self.client.snapshot(self.mesh.url)

    def tally(self, streams: Iterable[AnswerRecord]) -> Tally:
        """Check of all streams."""
        return tally(streams, self.expected, is_exact=self.options.exact)

    def missing(self, snapshot: MeshSnapshot, since_s: float) -> str | None:
        """Reason why the mesh is not yet as before; see `what_is_missing`."""
        return what_is_missing(
            snapshot,
            since_s=since_s,
            num_hosts=self.num_hosts,
            with_replicas=self.options.awaits_replicas and self.num_hosts > self.options.num_stages,
        )

    def wait_whole(self, since_s: float) -> float:
        """Wait until the mesh is as before, restarting hosts that left.

        Args:
            since_s: Every stream that was sent before must have gone on since; of `time.perf_counter`.

        Returns:
            Time when it was whole, of `time.perf_counter`.

        Raises:
            MeshError: If it is not in time.
        """
        recovery = RecoveryWatch(self, since_s)
        while (whole_s := recovery.poll()) is None:
            if recovery.is_late:
                raise MeshError(f"not whole after {self.options.whole_timeout_s:g} s: {recovery.missing}")
            time.sleep(_POLL_S)
        return whole_s

    def _once(self, questions: Iterable[Question]) -> Schedule:
        requests = (question.request for question in questions)
        num_at_once = self.options.num_streams
        return Schedule.once(
            self.mesh.url, requests, num_at_once, is_patient=True, timeout_s=_STREAM_TIMEOUT_S
        )


class RecoveryWatch:
    """Watches a mesh become whole again.

    Args:
        bed: The mesh.
        since_s: See `FaultTestBed.wait_whole`; may be moved.

    Attributes:
        missing: Reason at the latest check.
        latest: That look.
        rejoined: Hosts that were started again.
    """

    def __init__(self, bed: FaultTestBed, since_s: float) -> None:
        self._bed = bed
        self._begun_s = time.perf_counter()
        self._whole_s: float | None = None
        self.since_s = since_s
        self.missing: str | None = "not checked yet"
        self.latest: MeshSnapshot | None = None
        self.rejoined: list[int] = []

    @property
    def is_late(self) -> bool:
        """Whether it takes longer than the user allows."""
        return time.perf_counter() - self._begun_s > self._bed.options.whole_timeout_s

    def poll(self) -> float | None:
        """Look once; returns since when it has been whole, once it has been for long enough."""
        bed = self._bed
        self.rejoined += bed.injector.restart_hosts()
        snapshot = self.latest = bed.snapshot()
        self.missing = bed.missing(snapshot, self.since_s)
        if self.missing is not None:
            self._whole_s = None
            return None
        if self._whole_s is None:
            self._whole_s = snapshot.at_s
        return self._whole_s if snapshot.at_s - self._whole_s >= _SETTLE_S else None


@dataclass(frozen=True)
class _Episode:
    """A fault, and the time until the mesh was whole again."""

    injected: InjectedFault
    probe: RunningLoad
    stop_s: float
    is_whole: bool
    recovery: RecoveryWatch
    head_log: HeadLogAccount


class FaultRun:
    """Streams under faults.

    Args:
        bed: The test bed.
        keep: Keeps the first failure.
    """

    def __init__(self, bed: FaultTestBed, keep: FirstFailure) -> None:
        self._bed = bed
        self._keep = keep
        self._episodes: list[_Episode] = []
        self._begun_s = time.perf_counter()
        self._load = bed.keep_asking(HangUps(bed.options.hang_up_share, bed.options.seed))
        self._num_checked = 0

    @property
    def streams(self) -> list[AnswerRecord]:
        """That have ended since this began."""
        return self._load.answers

    def begin(self) -> None:
        """Wait until all streams run; raises MeshError if they do not."""
        self._bed.wait_whole(time.perf_counter())

    def end(self) -> None:
        """Have the streams run to their ends; raises MeshError if they do not end."""
        self._load.end(timeout_s=ANSWERS_TIMEOUT_S)
        self._check()

    def inject(self, fault: Fault, do: Callable[[MeshSnapshot], InjectedFault]) -> None:
        """Wait, inject a fault, and wait until the mesh is whole again.

        Args:
            fault: The fault.
            do: Does it.

        Raises:
            MeshError: If the mesh is not whole again in time, not even after its hosts were started anew.
        """
        bed = self._bed
        time.sleep(fault.wait_s)
        log_begin = self._log_size()
        injected = do(bed.snapshot())
        probe = bed.probe(short_question(fault.number))
        log.info("harmed", number=fault.number, kind=fault.kind, host=injected.host)
        recovery = RecoveryWatch(bed, injected.at_s + _SHOWS_S)
        is_whole, stop_s = self._await_recovery(injected, recovery)
        head_log = account_of(events_of(self._log_since(log_begin)))
        self._episodes.append(_Episode(injected, probe, stop_s, is_whole, recovery, head_log))
        log.info(
            "repaired" if is_whole else "not_repaired",
            number=fault.number,
            took_s=round(stop_s - injected.at_s, 1),
            missing=recovery.missing,
            how=head_log.reason,
        )
        if not is_whole:
            self._keep.keep(bed, f"fault {fault.number} ({fault.kind}): {recovery.missing}", [])
            self._restart_hosts(injected)
        self._check()

    def repairs(self) -> list[Repair]:
        """Result of each fault, once the streams have ended."""
        return [self._repair(episode) for episode in self._episodes]

    def _await_recovery(self, injected: InjectedFault, recovery: RecoveryWatch) -> tuple[bool, float]:
        """Whether the mesh became whole in time, and when it was, or was given up."""
        takes_back_s = injected.at_s + injected.fault.hold_s if injected.fault.kind.is_held else None
        # A leaving host serves until it has left.
        is_to_leave = injected.fault.kind is FaultKind.LEAVE
        while True:
            if takes_back_s is not None and time.perf_counter() >= takes_back_s:
                self._bed.injector.revert(injected)
                recovery.since_s = time.perf_counter()
                takes_back_s = None
            whole_s = recovery.poll()
            if is_to_leave and injected.host in recovery.rejoined:
                recovery.since_s = time.perf_counter()
                is_to_leave = False
            elif whole_s is not None and takes_back_s is None and not is_to_leave:
                return True, whole_s
            if recovery.is_late:
                return False, time.perf_counter()
            time.sleep(_POLL_S)

    def _restart_hosts(self, injected: InjectedFault) -> None:
        """Later faults need all hosts: those that are not ready lose all and join again."""
        bed = self._bed
        bed.injector.revert(injected)
        ready = bed.snapshot().ready_hosts
        for host in range(1, bed.lab.num_hosts):
            if f"host{host}" not in ready:
                bed.lab.kill(host)
        bed.wait_whole(time.perf_counter())

    def _log_size(self) -> int:
        return self._bed.mesh.log(0).stat().st_size

    def _log_since(self, begin: int) -> str:
        with self._bed.mesh.log(0).open("rb") as file:
            file.seek(begin)
            return file.read().decode(errors="replace")

    def _check(self) -> None:
        """Record the first stream that is not as expected."""
        new = self.streams[self._num_checked :]
        self._num_checked += len(new)
        for stream in new:
            problems = self._bed.tally([stream]).problems
            if problems:
                log.warning("bad_stream", request=problems[0].request, what=problems[0].detail)
                reason = f"{problems[0].request}: {problems[0].kind}: {problems[0].detail}"
                self._keep.keep(self._bed, reason, [stream])

    def _repair(self, episode: _Episode) -> Repair:
        injected, recovery = episode.injected, episode.recovery
        streams = self.streams
        return Repair(
            number=injected.fault.number,
            kind=injected.fault.kind,
            host=f"host{injected.host}",
            at_s=injected.at_s - self._begun_s,
            hold_s=injected.fault.hold_s if injected.fault.kind.is_held else None,
            whole_s=episode.stop_s - injected.at_s if episode.is_whole else None,
            pauses_s=pauses_s(streams, injected.at_s, episode.stop_s),
            silence_s=silence_s(streams, injected.at_s, episode.stop_s),
            newcomer=probe_outcome(episode.probe.wait(_PROBE_TIMEOUT_S).answers[0]),
            repair_s=episode.head_log.repair_s,
            is_warm=episode.head_log.is_warm,
            reason=episode.head_log.reason,
            rejoined=tuple(dict.fromkeys(recovery.rejoined)),
            problem="" if episode.is_whole else recovery.missing or "",
        )


class FirstFailure:
    """Copies the logs of all hosts, with the faulty streams, once.

    Args:
        folder: Of the report; a folder in it is made when there is something to keep.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._is_kept = False

    def keep(self, bed: FaultTestBed, reason: str, streams: list[AnswerRecord]) -> None:
        """Keep it, unless something was kept before.

        Args:
            bed: The test bed.
            reason: What went wrong.
            streams: Faulty streams; the expected ones are written beside them.
        """
        if self._is_kept:
            return
        self._is_kept = True
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for host in range(bed.lab.num_hosts):
            log = bed.mesh.log(host)
            if log.exists():
                shutil.copyfile(log, self._folder / log.name)
        names = {stream.record.prompt_id for stream in streams}
        fields = {
            "reason": reason,
            "streams": [asdict(stream) for stream in streams],
            "undisturbed": {name: asdict(bed.expected[name]) for name in sorted(names)},
        }
        text = json.dumps(fields, indent=1, ensure_ascii=False)
        (self._folder / "failure.json").write_text(text + "\n", encoding="utf-8")


def prepared_bed(lab: Lab, mesh: MeshSystem, client: LoadClient, options: ChaosOptions) -> FaultTestBed:
    """A test bed whose questions have been answered without faults.

    Args:
        lab: Host 0 is the head.
        mesh: On it, up.
        client: On the head's host.
        options: Options of the run.

    Raises:
        MeshError: If an answer is not sound.
    """
    asked = questions(options.num_questions, options.answer_tokens, options.seed)
    bed = FaultTestBed(lab, mesh, client, FaultInjector(lab, mesh), options, asked, {})
    log.info("asking_undisturbed", questions=len(asked), at_once=options.num_streams)
    streams = bed.start_all().wait(ANSWERS_TIMEOUT_S).answers
    answers = {stream.record.prompt_id: stream for stream in streams}
    expected = {question.id: Expected(question.turn, answers[question.id]) for question in asked}
    found = tally(streams, expected, is_exact=True)
    if found.problems or found.num_refused:
        worst = found.problems[0].detail if found.problems else "rejected with 503"
        raise MeshError(f"a question failed in the undisturbed run: {worst}")
    return replace(bed, expected=expected)


def what_is_missing(
    snapshot: MeshSnapshot, *, since_s: float, num_hosts: int, with_replicas: bool
) -> str | None:
    """Reason why a mesh is not yet as before; None if it is.

    Args:
        snapshot: State of the mesh.
        since_s: Every request sent before must have got a token since; of `time.perf_counter`.
        num_hosts: So many must be ready, spare ones included.
        with_replicas: Whether spare hosts must have loaded every stage ahead.
    """
    status = snapshot.status
    if status is None:
        return "the head does not answer"
    if not status.ready:
        return f"not ready: {status.phase}"
    if len(snapshot.ready_hosts) < num_hosts:
        return f"{len(snapshot.ready_hosts)} of {num_hosts} hosts are ready"
    if with_replicas and (cold := snapshot.layers_without_replica):
        return f"layers {cold[0]} have no replica"
    waiting = [each for each in snapshot.running if each.sent_s < since_s and (each.last_s or 0.0) < since_s]
    if waiting:
        return f"{len(waiting)} of {len(snapshot.running)} streams have not gone on"
    return None
