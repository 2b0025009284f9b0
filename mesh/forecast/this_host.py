"""Plans without a mesh: for this host alone, or for hosts on paper whose speed is guessed from this one's."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from mesh.forecast.surroundings import KnownHost, Rehearsed, Surroundings
from mesh.placement.host_capacity import HostCapacity
from mesh.placement.links import Links
from mesh.util.child_environment import inherited_environment
from stages.host.profile_request import StageTiming

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.cluster.host_facts import HostFacts
    from stages.host.profile_request import RehearsalOrder

_TIMEOUT_S: Final = 120.0


def this_host(name: str, facts: HostFacts) -> Surroundings:
    """This host, which would hold everything."""
    capacity = HostCapacity(name, facts.memory_bytes, facts.speed_gb_per_s)
    return Surroundings(
        hosts=(KnownHost(capacity, facts.num_threads),),
        head=name,
        links=Links(()),
        timer=_rehearse_here,
        basis="computing was timed on this host",
    )


def hosts_on_paper(hosts: Sequence[KnownHost], links: Links, facts: HostFacts) -> Surroundings:
    """Hosts that were only named; the first of them is the head.

    Args:
        hosts: At least one.
        links: Between them.
        facts: Of this host, where stages are timed; what comes out is scaled by how fast memory is read.
    """
    speeds = {host.capacity.name: host.capacity.speed_gb_per_s for host in hosts}

    def timer(wanted: Mapping[str, Sequence[RehearsalOrder]]) -> Mapping[str, Rehearsed]:
        # On its own threads, by whose speed it is scaled.
        here = {
            host: [replace(order, num_threads=facts.num_threads) for order in orders]
            for host, orders in wanted.items()
        }
        return {
            host: _scaled(rehearsed, facts.speed_gb_per_s / speeds[host])
            for host, rehearsed in _rehearse_here(here).items()
        }

    return Surroundings(
        hosts=tuple(hosts),
        head=hosts[0].capacity.name,
        links=links,
        timer=timer,
        basis="computing was timed on this host and scaled by the memory speed of the hosts named",
    )


def _scaled(rehearsed: Rehearsed, factor: float) -> Rehearsed:
    return replace(
        rehearsed,
        timings=tuple(
            replace(timing, row_ms=timing.row_ms * factor, chunk_ms=timing.chunk_ms * factor)
            for timing in rehearsed.timings
        ),
    )


def _rehearse_here(wanted: Mapping[str, Sequence[RehearsalOrder]]) -> Mapping[str, Rehearsed]:
    return {host: _in_a_child(orders) for host, orders in wanted.items()}


def _in_a_child(orders: Sequence[RehearsalOrder]) -> Rehearsed:
    timings = []
    for order in orders:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "stages.host.profiler"],
                input=json.dumps(order.as_dict()),
                env=inherited_environment(),
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return Rehearsed(failure=f"timing a stage took longer than {_TIMEOUT_S:g} s")
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
            return Rehearsed(failure=f"this host cannot time a stage: {lines[-1]}")
        timings.append(StageTiming(**json.loads(done.stdout)))
    return Rehearsed(tuple(timings))
