"""Throughput with fixed numbers of groups of sessions, beside the number that a mesh finds by itself.

    python -m tests.qualification.group_sizes --at-once 16

In the lab: a head without layers and three stage hosts. One mesh after the other is started with
`--set groups=N`, and one without; each answers the same requests, all at once, and there are several passes
over all of them, since machines drift.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

import click
import structlog

from mesh.cli.shared_options import Numbers, int_option
from mesh.coordinator.groups import group_counts
from mesh.serve.options import demo_model
from mesh.status import SessionsStatus
from meshbench.experiment import lab_experiment
from meshbench.lab.network import Lab
from meshbench.lab.systems import MeshSystem
from meshbench.load_client.client import LoadClient
from meshbench.paired_systems import even_split
from meshbench.report_tools import Line, Report, lines_section, table_section
from meshbench.shared_options import FILE, json_option, logs_option
from meshbench.stress.harness import LoadTestBed
from meshbench.stress.measurements import short_prompts
from meshbench.under_test.mesh import LabMesh
from stages.process_limits import processor_name
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_NUM_STAGES: Final = 3
_CTX_SIZE: Final = 512
_FOUND: Final = 0
# Rounds of warm-up at most: what is measured is what the search has found, which takes several.
_MOST_WARM_UP_ROUNDS: Final = 8
_SHARE_OF_BEST: Final = 0.95

log = structlog.get_logger()


@dataclass(frozen=True)
class _Load:
    """Requests that each mesh answers."""

    delay_ms: float
    """One way."""
    at_once: int
    """Requests of a round, all at once."""
    num_tokens: int
    """Tokens of an answer."""
    num_rounds: int
    """Rounds that count, of each pass."""


@click.command()
@click.option("--model", type=FILE, help="The demo's model unless given.")
@click.option("--delay-ms", type=float, default=5.0, show_default=True, help="One way.")
@int_option("--at-once", default=16, help="Requests at once.")
@int_option("--tokens", "num_tokens", least=16, default=128, help="Tokens of an answer.")
@int_option("--rounds", "num_rounds", default=2, help="Rounds of requests in each pass.")
@int_option("--passes", "num_passes", default=2, help="Passes over all numbers of groups.")
@click.option(
    "--groups",
    "counts",
    type=Numbers(int, 1),
    metavar="A,B,…",
    help="Fixed numbers of groups; one for each size of a group unless given.",
)
@logs_option()
@json_option
@lab_experiment
def main(
    *,
    model: Path | None,
    delay_ms: float,
    at_once: int,
    num_tokens: int,
    num_rounds: int,
    num_passes: int,
    counts: tuple[int, ...] | None,
    logs: Path,
) -> Report:
    """Measure the number of groups that is found beside fixed ones; exits 0 whatever it finds."""
    model = model or demo_model()
    load = _Load(delay_ms, at_once, num_tokens, num_rounds)
    settings = (_FOUND, *(counts or group_counts(at_once)))
    rates: dict[int, list[float]] = defaultdict(list)
    with (
        Lab(_NUM_STAGES + 1, shared=[logs, model.resolve().parent]) as lab,
        LoadClient(lab) as client,
    ):
        for number in range(num_passes):
            # In turn from either end, so that a drift meets all alike.
            for count in settings if number % 2 == 0 else reversed(settings):
                mesh = _mesh(lab, model, logs, at_once, count)
                rates[count] += _rates(lab, client, mesh, load, is_fixed=count != _FOUND, seed=number)
                log.info("measured", groups=count or "found", tokens_per_s=round(rates[count][-1], 1))
    rows = [
        [str(count) if count else "found", f"{median(found):.1f}", " ".join(f"{each:.1f}" for each in found)]
        for count, found in rates.items()
    ]
    line = _line(rates, at_once)
    return Report(
        title="Numbers of groups",
        conditions={
            "model": model.name,
            "processor": processor_name(),
            "one_way_delay_ms": delay_ms,
            "requests_at_once": at_once,
        },
        sections=[
            table_section("## Rates", ["groups", "tokens/s", "each round"], rows),
            lines_section("## Figures", [line]),
        ],
        fields={"line": line, "rates": rates},
    )


def _rates(
    lab: Lab, client: LoadClient, mesh: MeshSystem, load: _Load, *, is_fixed: bool, seed: int
) -> list[float]:
    """Tokens per second of each round, from the start of a mesh to its end."""
    lab.set_delay_ms(0)
    try:
        mesh.start()
        lab.set_delay_ms(load.delay_ms)
        bed = LoadTestBed(client, LabMesh(lab, mesh), _CTX_SIZE, processes=mesh)
        for number in range(_MOST_WARM_UP_ROUNDS):
            _answer(bed, load, 1000 + number)
            sessions = bed.mesh.status().sessions or SessionsStatus()
            if is_fixed or load.at_once in sessions.groups_found:
                break
        rates = [_answer(bed, load, 100 * seed + number) for number in range(load.num_rounds)]
        mesh.stop()
    finally:
        mesh.kill()
    return rates


def _mesh(lab: Lab, model: Path, logs: Path, at_once: int, count: int) -> MeshSystem:
    serve = ["--speculate", "off", "--parallel", str(at_once), "--ctx-size", str(_CTX_SIZE)]
    return MeshSystem(
        lab,
        model,
        logs,
        split=even_split(read_model_facts(model).n_layers, _NUM_STAGES),
        options=[*serve, *(("--set", f"groups={count}") if count else ())],
    )


def _answer(bed: LoadTestBed, load: _Load, seed: int) -> float:
    scripts = short_prompts(load.at_once, seed, load.num_tokens)
    return bed.measure_mesh(scripts, num_at_once=load.at_once).tokens_per_s


def _line(rates: Mapping[int, Sequence[float]], at_once: int) -> Line:
    medians = {count: median(found) for count, found in rates.items()}
    best = max((count for count in medians if count != _FOUND), key=lambda count: medians[count])
    return Line(
        f"tokens/s at {at_once} concurrent, number of groups as found, of the best fixed one ({best})",
        medians[_FOUND] / medians[best],
        _SHARE_OF_BEST,
    )


if __name__ == "__main__":
    main()
