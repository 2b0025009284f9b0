"""Scenario `no-room`: a host is lost for good, no other has room for its layers, then it joins again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import structlog

from mesh.bench.chaos.bounds import NEWCOMER_S, stream_lines
from mesh.bench.chaos.ground import ANSWERS_TIMEOUT_S
from mesh.bench.chaos.question import short_question
from mesh.bench.chaos.repair import newcomer_of
from mesh.bench.chaos.scenario import INTERRUPTED, Scenario
from mesh.bench.stress.checks import Line
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.bench.chaos.first_failure import FirstFailure
    from mesh.bench.chaos.ground import Ground
    from mesh.bench.chaos.stream import Stream

log = structlog.get_logger()

_FIRST_NUMBER: Final = 20_000
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
        ground.crowd.probe(_FIRST_NUMBER + index, short_question(index))
    return [
        ground.crowd.wait_probe(_FIRST_NUMBER + index, timeout_s=ANSWERS_TIMEOUT_S)
        for index in range(_NUM_NEWCOMERS)
    ]
