"""Scenario `leave`: each host in turn is told to go, under load."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from mesh.bench.chaos.bounds import stream_lines
from mesh.bench.chaos.harm import Harm
from mesh.bench.chaos.harms import suffer_all
from mesh.bench.chaos.scenario import Scenario

if TYPE_CHECKING:
    from mesh.bench.chaos.first_failure import FirstFailure
    from mesh.bench.chaos.ground import Ground
    from mesh.bench.chaos.harming import Done
    from mesh.bench.chaos.look import Look

# Newcomers of this scenario have numbers of their own.
_FIRST_NUMBER: Final = 10_000
_WAIT_S: Final = 2.0


def try_leaving(ground: Ground, keep: FirstFailure) -> Scenario:
    """One host after the other, spare ones too; each joins again before the next one goes."""
    harms = []
    for host in range(1, ground.lab.num_hosts):
        harm = Harm(_FIRST_NUMBER + host, "leave", _WAIT_S, 0.0, 0.0)
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
