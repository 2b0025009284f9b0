"""Scenarios: faults, a restart of the head, leaving hosts, and too little memory."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from mesh.bench.stress.checks import Line
from mesh.qualification.chaos.clients import short_question
from mesh.qualification.chaos.faults import Harm, draw_harms
from mesh.qualification.chaos.harness import ANSWERS_TIMEOUT_S, Harmed
from mesh.qualification.chaos.results import (
    INTERRUPTED,
    NEWCOMER_S,
    SERVING_S,
    Scenario,
    newcomer_of,
    repair_lines,
    stream_lines,
)
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mesh.qualification.chaos.clients import Look, Stream
    from mesh.qualification.chaos.faults import Done
    from mesh.qualification.chaos.harness import FirstFailure, Ground


def try_harms(ground: Ground, keep: FirstFailure) -> Scenario:
    """Do as many as the user wants, as far as the mesh comes back."""
    options = ground.options
    harms = draw_harms(options.num_harms, options.kinds, options.seed, is_short=options.is_short)
    harmed, failures = suffer_all(ground, keep, ((harm, partial(ground.harming.do, harm)) for harm in harms))
    found = ground.tally(harmed.streams)
    repairs = harmed.repairs()
    return Scenario(
        name="harms",
        lines=(
            *stream_lines(found, f"{len(repairs)} harms", is_exact=options.exact),
            *repair_lines(repairs),
        ),
        repairs=tuple(repairs),
        problems=found.problems,
        failures=failures,
    )


def suffer_all(
    ground: Ground, keep: FirstFailure, harms: Iterable[tuple[Harm, Callable[[Look], Done]]]
) -> tuple[Harmed, tuple[str, ...]]:
    """Have streams run, do one harm after the other, let the streams end.

    Returns:
        What came of them, and why it ended early: nothing if it did not.
    """
    harmed = Harmed(ground, keep)
    failures = []
    try:
        harmed.begin()
        for harm, do in harms:
            harmed.suffer(harm, do)
    except MeshError as error:
        failures.append(error.message)
    except KeyboardInterrupt:
        failures.append(INTERRUPTED)
    try:
        harmed.end()
    except MeshError as error:
        failures.append(error.message)
    return harmed, tuple(failures)


log = structlog.get_logger()

# As a service manager waits before it starts something again.
_DOWN_S: Final = 2.0
_STARTS: Final = 3
_CACHED: Final = ("find", "/tmp/home", "-name", "*.gguf", "-printf", "%p %i %s\\n")  # noqa: S108 - the host's own


def try_head_restart(ground: Ground, keep: FirstFailure) -> Scenario:
    """Kill it some times; each time the stages must be taken over, and give the same answers."""
    took_s: list[float] = []
    failures: list[str] = []
    before: set[str] = set()
    begin = len(ground.crowd.streams)
    try:
        # Spare hosts have fetched what they want by then.
        ground.wait_whole(time.perf_counter())
        before = _cached(ground)
        for _ in range(1 if ground.options.is_short else _STARTS):
            took_s.append(_restart(ground))
            ground.wait_whole(time.perf_counter())
            ground.crowd.ask_all(ground.questions, ground.options.num_streams, timeout_s=ANSWERS_TIMEOUT_S)
    except MeshError as error:
        failures.append(error.message)
        keep.keep(ground, error.message, [])
    except KeyboardInterrupt:
        failures.append(INTERRUPTED)
    streams = ground.crowd.streams[begin:]
    found = ground.tally(streams)
    new_files = _cached(ground) - before
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
            *stream_lines(found, "head killed and started", is_exact=ground.options.exact),
        ),
        problems=found.problems,
        failures=tuple(failures),
    )


def _restart(ground: Ground) -> float:
    """Kill and start the head; returns how long it takes from its start until it serves, in seconds."""
    head = ground.mesh.process(0)
    os.kill(head.pid, signal.SIGKILL)
    head.wait()
    time.sleep(_DOWN_S)
    start_s = time.perf_counter()
    ground.mesh.start_head()
    ground.mesh.wait_healthy(timeout_s=ground.options.whole_timeout_s)
    took_s = time.perf_counter() - start_s
    log.info("head_serves_again", took_s=round(took_s, 1))
    return took_s


def _cached(ground: Ground) -> set[str]:
    """Every stage file of every host: where, which inode, how large."""
    found = set()
    for host in range(1, ground.lab.num_hosts):
        lines = ground.lab.exec(host, _CACHED).stdout.splitlines()
        found |= {f"host{host} {line}" for line in lines}
    return found


# Newcomers of this scenario have numbers of their own.
_FIRST_LEAVE_NUMBER: Final = 10_000
_WAIT_S: Final = 2.0


def try_leaving(ground: Ground, keep: FirstFailure) -> Scenario:
    """One host after the other, spare ones too; each joins again before the next one goes."""
    harms = []
    for host in range(1, ground.lab.num_hosts):
        harm = Harm(_FIRST_LEAVE_NUMBER + host, "leave", _WAIT_S, 0.0, 0.0)
        harms.append((harm, partial(_leave, ground, host, harm)))
    harmed, failures = suffer_all(ground, keep, harms)
    found = ground.tally(harmed.streams)
    repairs = harmed.repairs()
    when = f"{len(repairs)} hosts left in turn"
    return Scenario(
        name="leave",
        lines=tuple(stream_lines(found, when, is_exact=ground.options.exact)),
        repairs=tuple(repairs),
        problems=found.problems,
        failures=failures,
    )


def _leave(ground: Ground, host: int, harm: Harm, _look: Look) -> Done:
    return ground.harming.leave(host, harm)


_FIRST_PROBE_NUMBER: Final = 20_000
_NUM_NEWCOMERS: Final = 5
_RUNNING_S: Final = 3.0
# Streams end with an error once it is known that nobody can take the layers.
_GIVE_UP_S: Final = 60.0
_POLL_S: Final = 0.25


def try_no_room(ground: Ground, keep: FirstFailure) -> Scenario:
    """Lose the second stage's host while streams run, ask on, bring it back."""
    crowd = ground.crowd
    failures: list[str] = []
    lost: list[Stream] = []
    newcomers: list[Stream] = []
    took_s: float | None = None
    begin = healed = len(crowd.streams)
    killed_s = time.perf_counter()
    try:
        crowd.keep_asking(ground.questions, ground.options.num_streams)
        ground.wait_whole(time.perf_counter())
        time.sleep(_RUNNING_S)
        names = crowd.look().stage_hosts
        host = int(names[min(1, len(names) - 1)].removeprefix("host"))
        killed_s = time.perf_counter()
        ground.lab.kill(host)
        log.info("host_lost", host=host)
        _wait_given_up(ground, killed_s)
        newcomers = _newcomers(ground)
        crowd.let_end(timeout_s=ANSWERS_TIMEOUT_S)
        lost = crowd.streams[begin:]
        back_s = time.perf_counter()
        ground.mesh.start_join(host)
        took_s = ground.wait_whole(back_s) - back_s
        healed = len(crowd.streams)
        crowd.ask_all(ground.questions, ground.options.num_streams, timeout_s=ANSWERS_TIMEOUT_S)
    except MeshError as error:
        failures.append(error.message)
        keep.keep(ground, error.message, [])
    except KeyboardInterrupt:
        failures.append(INTERRUPTED)
    after = ground.tally(crowd.streams[healed:])
    return Scenario(
        name="no-room",
        lines=(
            *_lost_lines(lost, newcomers, killed_s),
            Line(
                "no room: whole again after a host joined, s",
                took_s,
                ground.options.whole_timeout_s,
                is_ceiling=True,
            ),
            *stream_lines(after, "no room, then room", is_exact=ground.options.exact),
        ),
        problems=after.problems,
        failures=tuple(failures),
    )


def _lost_lines(lost: Sequence[Stream], newcomers: Sequence[Stream], killed_s: float) -> list[Line]:
    """What clients are told while there is no room."""
    running = [
        stream.told.record
        for stream in lost
        if stream.told.record.sent_s < killed_s < stream.told.record.ended_s
    ]
    # One whose last token was on its way may well be complete.
    unclear = [
        record for record in running if record.failure is not None and record.failure.kind != "stream_error"
    ]
    told = [newcomer_of(stream) for stream in newcomers]
    not_refused = [newcomer.outcome for newcomer in told if newcomer.outcome != "503"]
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
            len(not_refused) if told else None,
            0,
            is_ceiling=True,
            note=f"of {len(told)}; {'; '.join(dict.fromkeys(not_refused))}",
        ),
        Line(
            "no room: a new request's 503, worst, s",
            max((newcomer.took_s for newcomer in told), default=None),
            NEWCOMER_S,
            is_ceiling=True,
        ),
    ]


def _wait_given_up(ground: Ground, killed_s: float) -> None:
    """Wait until no stream of before runs any more; raises MeshError if one does for too long."""
    while any(each.sent_s < killed_s for each in ground.crowd.look().running):
        if time.perf_counter() - killed_s > _GIVE_UP_S:
            raise MeshError(f"no room, and streams still run after {_GIVE_UP_S:g} s")
        time.sleep(_POLL_S)


def _newcomers(ground: Ground) -> list[Stream]:
    for index in range(_NUM_NEWCOMERS):
        ground.crowd.probe(_FIRST_PROBE_NUMBER + index, short_question(index))
    return [
        ground.crowd.wait_probe(_FIRST_PROBE_NUMBER + index, timeout_s=ANSWERS_TIMEOUT_S)
        for index in range(_NUM_NEWCOMERS)
    ]
