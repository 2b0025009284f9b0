"""Scenario `harms`: every kind of loss at random moments, one after the other."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mesh.bench.chaos.bounds import repair_lines, stream_lines
from mesh.bench.chaos.harm import Harm, draw_harms
from mesh.bench.chaos.harmed import Harmed
from mesh.bench.chaos.scenario import INTERRUPTED, Scenario
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mesh.bench.chaos.first_failure import FirstFailure
    from mesh.bench.chaos.ground import Ground
    from mesh.bench.chaos.harming import Done
    from mesh.bench.chaos.look import Look


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
