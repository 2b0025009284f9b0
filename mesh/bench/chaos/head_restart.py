"""Scenario `head`: the head's `mesh serve` is killed, and started again."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Final

import structlog

from mesh.bench.chaos.bounds import SERVING_S, stream_lines
from mesh.bench.chaos.ground import ANSWERS_TIMEOUT_S
from mesh.bench.chaos.scenario import INTERRUPTED, Scenario
from mesh.bench.stress.checks import Line
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from mesh.bench.chaos.first_failure import FirstFailure
    from mesh.bench.chaos.ground import Ground

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
