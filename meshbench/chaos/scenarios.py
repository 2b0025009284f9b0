"""Scenarios: faults, a restart of the head, leaving hosts, and too little memory."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from meshbench.chaos.fault_kinds import FaultKind
from meshbench.chaos.faults import Fault, draw_faults
from meshbench.chaos.harness import ANSWERS_TIMEOUT_S, FaultRun
from meshbench.chaos.questions import short_question
from meshbench.chaos.results import (
    PROBE_S,
    SERVING_S,
    Scenario,
    probe_outcome,
    repair_lines,
    stream_lines,
)
from meshbench.report_tools import INTERRUPTED, Line
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from meshbench.chaos.faults import InjectedFault
    from meshbench.chaos.harness import FaultTestBed, FirstFailure
    from meshbench.load_client.answers import AnswerRecord
    from meshbench.load_client.client import MeshSnapshot, RunningLoad

# As a service manager waits before it starts something again.
_DOWN_S: Final = 2.0
_STARTS: Final = 3
_CACHED: Final = ("find", "/tmp/home", "-name", "*.gguf", "-printf", "%p %i %s\\n")  # noqa: S108 - the host's own
# Beyond those of faults.
_FIRST_LEAVE_NUMBER: Final = 10_000
_WAIT_S: Final = 2.0
_NUM_PROBES: Final = 5
_RUNNING_S: Final = 3.0
# Streams end with an error once it is known that no host can hold the layers.
_GIVE_UP_S: Final = 60.0
_POLL_S: Final = 0.25

log = structlog.get_logger()


def try_faults(bed: FaultTestBed, keep: FirstFailure) -> Scenario:
    """Inject the requested number of faults, as long as the mesh recovers."""
    options = bed.options
    faults = draw_faults(options.num_faults, options.kinds, options.seed, is_short=options.is_short)
    run, failures = inject_all(bed, keep, ((fault, partial(bed.injector.inject, fault)) for fault in faults))
    found = bed.tally(run.streams)
    repairs = run.repairs()
    return Scenario(
        name="faults",
        lines=(
            *stream_lines(found, f"{len(repairs)} faults", is_exact=options.exact),
            *repair_lines(repairs),
        ),
        repairs=tuple(repairs),
        problems=found.problems,
        failures=failures,
    )


def inject_all(
    bed: FaultTestBed,
    keep: FirstFailure,
    faults: Iterable[tuple[Fault, Callable[[MeshSnapshot], InjectedFault]]],
) -> tuple[FaultRun, tuple[str, ...]]:
    """Have streams run, do one fault after the other, let the streams end.

    Returns:
        Results, and the reason of an early end, empty for none.
    """
    run = FaultRun(bed, keep)
    failures = []
    try:
        run.begin()
        for fault, do in faults:
            run.inject(fault, do)
    except MeshError as error:
        failures.append(error.message)
    except KeyboardInterrupt:
        failures.append(INTERRUPTED)
    try:
        run.end()
    except MeshError as error:
        failures.append(error.message)
    return run, tuple(failures)


def try_head_restart(bed: FaultTestBed, keep: FirstFailure) -> Scenario:
    """Kill it some times; each time the stages must be taken over, and give the same answers."""
    took_s: list[float] = []
    failures: list[str] = []
    before: set[str] = set()
    loads: list[RunningLoad] = []
    try:
        # Spares have fetched their weights by then.
        bed.wait_whole(time.perf_counter())
        before = _cached(bed)
        for _ in range(1 if bed.options.is_short else _STARTS):
            took_s.append(_restart(bed))
            bed.wait_whole(time.perf_counter())
            loads.append(bed.start_all())
            loads[-1].wait(ANSWERS_TIMEOUT_S)
    except MeshError as error:
        failures.append(error.message)
        keep.keep(bed, error.message, [])
    except KeyboardInterrupt:
        failures.append(INTERRUPTED)
    streams = [stream for load in loads for stream in load.answers]
    found = bed.tally(streams)
    new_files = _cached(bed) - before
    return Scenario(
        name="head",
        lines=(
            Line(
                "head killed and started: serving after, worst, s",
                max(took_s, default=None),
                SERVING_S,
                is_ceiling=True,
                note=f"{len(took_s)} times",
            ),
            Line(
                "head killed and started: stage files sent again",
                len(new_files) if took_s else None,
                0,
                is_ceiling=True,
                note=f"of {len(before)} on the hosts",
            ),
            *stream_lines(found, "head killed and started", is_exact=bed.options.exact),
        ),
        problems=found.problems,
        failures=tuple(failures),
    )


def _restart(bed: FaultTestBed) -> float:
    """Kill and start the head; returns how long it takes from its start until it serves, in seconds."""
    head = bed.mesh.process(0)
    os.kill(head.pid, signal.SIGKILL)
    head.wait()
    time.sleep(_DOWN_S)
    start_s = time.perf_counter()
    bed.mesh.start_head()
    bed.mesh.wait_healthy(timeout_s=bed.options.whole_timeout_s)
    took_s = time.perf_counter() - start_s
    log.info("head_serves_again", took_s=round(took_s, 1))
    return took_s


def _cached(bed: FaultTestBed) -> set[str]:
    """Every stage file of every host: where, which inode, how large."""
    found = set()
    for host in range(1, bed.lab.num_hosts):
        lines = bed.lab.exec(host, _CACHED).stdout.splitlines()
        found |= {f"host{host} {line}" for line in lines}
    return found


def try_leaving(bed: FaultTestBed, keep: FirstFailure) -> Scenario:
    """One host after the other, spares included; each joins again before the next one leaves."""
    faults = []
    for host in range(1, bed.lab.num_hosts):
        fault = Fault(_FIRST_LEAVE_NUMBER + host, FaultKind.LEAVE, _WAIT_S, 0.0, 0.0)
        faults.append((fault, partial(_leave, bed, host, fault)))
    run, failures = inject_all(bed, keep, faults)
    found = bed.tally(run.streams)
    repairs = run.repairs()
    when = f"{len(repairs)} hosts left in turn"
    return Scenario(
        name="leave",
        lines=tuple(stream_lines(found, when, is_exact=bed.options.exact)),
        repairs=tuple(repairs),
        problems=found.problems,
        failures=failures,
    )


def _leave(bed: FaultTestBed, host: int, fault: Fault, _snapshot: MeshSnapshot) -> InjectedFault:
    return bed.injector.leave(host, fault)


def try_no_room(bed: FaultTestBed, keep: FirstFailure) -> Scenario:
    """Lose the second stage's host while streams run, continue to send requests, and bring it back."""
    failures: list[str] = []
    lost: list[AnswerRecord] = []
    probes: list[AnswerRecord] = []
    loads: list[RunningLoad] = []
    took_s: float | None = None
    killed_s = time.perf_counter()
    try:
        loads.append(bed.keep_asking())
        bed.wait_whole(time.perf_counter())
        time.sleep(_RUNNING_S)
        names = bed.snapshot().stage_hosts
        host = int(names[min(1, len(names) - 1)].removeprefix("host"))
        killed_s = time.perf_counter()
        bed.lab.kill(host)
        log.info("host_lost", host=host)
        _wait_given_up(bed, killed_s)
        probes = _probes(bed)
        loads[0].end(timeout_s=ANSWERS_TIMEOUT_S)
        lost = loads[0].answers
        back_s = time.perf_counter()
        bed.mesh.start_join(host)
        took_s = bed.wait_whole(back_s) - back_s
        loads = [bed.start_all()]
        loads[0].wait(ANSWERS_TIMEOUT_S)
    except MeshError as error:
        failures.append(error.message)
        keep.keep(bed, error.message, [])
    except KeyboardInterrupt:
        failures.append(INTERRUPTED)
    found = bed.tally(stream for load in loads for stream in load.answers)
    return Scenario(
        name="no-room",
        lines=(
            *_lost_lines(lost, probes, killed_s),
            Line(
                "no room: whole again after a host joined, s",
                took_s,
                bed.options.whole_timeout_s,
                is_ceiling=True,
            ),
            *stream_lines(found, "no room, then room", is_exact=bed.options.exact),
        ),
        problems=found.problems,
        failures=tuple(failures),
    )


def _lost_lines(lost: Sequence[AnswerRecord], probes: Sequence[AnswerRecord], killed_s: float) -> list[Line]:
    """Answers to clients while the model does not fit."""
    records = [stream.record for stream in lost]
    running = [record for record in records if record.sent_s < killed_s < record.ended_s]
    # A stream whose last token was in flight may be complete.
    unclear = [
        record for record in running if record.failure is not None and record.failure.kind != "stream_error"
    ]
    outcomes = [probe_outcome(stream) for stream in probes]
    not_refused = [probe.outcome for probe in outcomes if probe.outcome != "503"]
    words = {record.failure.message for record in running if record.failure is not None}
    return [
        Line(
            "no room: running streams that ended without a clear error",
            len(unclear) if running else None,
            0,
            is_ceiling=True,
            note=f"of {len(running)}; {'; '.join(sorted(words))}",
        ),
        Line(
            "no room: running streams ended after, worst, s",
            max((record.ended_s - killed_s for record in running), default=None),
            _GIVE_UP_S,
            is_ceiling=True,
        ),
        Line(
            "no room: new requests without 503 and Retry-After",
            len(not_refused) if outcomes else None,
            0,
            is_ceiling=True,
            note=f"of {len(outcomes)}; {'; '.join(dict.fromkeys(not_refused))}",
        ),
        Line(
            "no room: a new request's 503, worst, s",
            max((probe.took_s for probe in outcomes), default=None),
            PROBE_S,
            is_ceiling=True,
        ),
    ]


def _wait_given_up(bed: FaultTestBed, killed_s: float) -> None:
    """Wait until no stream of before runs any more; raises MeshError if one does for too long."""
    while any(each.sent_s < killed_s for each in bed.snapshot().running):
        if time.perf_counter() - killed_s > _GIVE_UP_S:
            raise MeshError(f"streams still run {_GIVE_UP_S} s after capacity was lost {_GIVE_UP_S:g} s")
        time.sleep(_POLL_S)


def _probes(bed: FaultTestBed) -> list[AnswerRecord]:
    loads = [bed.probe(short_question(index)) for index in range(_NUM_PROBES)]
    return [load.wait(ANSWERS_TIMEOUT_S).answers[0] for load in loads]
