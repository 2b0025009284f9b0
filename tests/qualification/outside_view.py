"""Figures of `mesh bench stress --url` beside those of the lab's own load, on one mesh.

    python -m tests.qualification.outside_view

In the lab: a head without layers and three stage hosts, started as by hand. The lab's load client and the
command on the head's host send the same chats in turn, the lab's once more at the end of each round: what its
own two loads differ by is the noise of the machine.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, Final

import click
import structlog

from mesh.cli.shared_options import Numbers, float_option, int_option
from mesh.serve.options import demo_model
from mesh.text.tokenizer import Tokenizer
from meshbench.experiment import lab_experiment
from meshbench.lab.network import Lab
from meshbench.lab.systems import COMMAND, MeshSystem
from meshbench.load_client.client import LoadClient
from meshbench.paired_systems import even_split
from meshbench.report_tools import Line, Report, Section, lines_section, markdown_table
from meshbench.shared_options import FILE, json_option, logs_option
from meshbench.stress.harness import LoadTestBed
from meshbench.stress.load_run import LoadRun, Subject
from meshbench.stress.options import LoadPlan
from meshbench.under_test.mesh import LabMesh
from spanmesh_proto.errors import MeshError
from stages.process_limits import processor_name
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_NUM_STAGES: Final = 3
_CTX_SIZE: Final = 2560
_NUM_CHATS: Final = 6
_TIMEOUT_S: Final = 1800.0
_LAB: Final = "lab"
_OUTSIDE: Final = "from outside"
_LAB_AGAIN: Final = "lab again"
_ORDER: Final = (_LAB, _OUTSIDE, _LAB_AGAIN)
# Bound on the ratio of both views, besides the noise: that of two loads of the lab.
_TOLERANCE: Final = 0.05

log = structlog.get_logger()


@dataclass(frozen=True)
class _Settings:
    model: Path
    delay_ms: float
    concurrency: tuple[int, ...]
    num_requests: int
    num_rounds: int

    @property
    def num_slots(self) -> int:
        """One for each request that is under way at once."""
        return max(self.concurrency)


@dataclass(frozen=True)
class StepFigures:
    """A step of a load, as one view of the mesh shows it."""

    num_at_once: int
    """Requests under way at once."""
    tokens_per_s: float
    """Of all requests together."""
    ttft_ms: float
    """Median time to first token."""
    itl_ms: float
    """Median inter-token latency."""


@click.command()
@click.option("--model", type=FILE, help="The demo's model unless given.")
@float_option("--delay-ms", default=5.0, help="One way.")
@click.option(
    "--concurrency",
    type=Numbers(int, 1, 64),
    default=(1, 4, 8),
    metavar="A,B,…",
    help="Concurrent requests of each step; 1,4,8 unless given.",
)
@int_option("--requests", "num_requests", default=24, help="Requests of each step.")
@int_option("--rounds", "num_rounds", default=3, help="Rounds of three loads each.")
@logs_option()
@json_option
@lab_experiment
def main(
    *,
    model: Path | None,
    delay_ms: float,
    concurrency: tuple[int, ...],
    num_requests: int,
    num_rounds: int,
    logs: Path,
) -> Report:
    """Measure one mesh from inside and outside the lab in turn; exits 0 whatever it finds."""
    settings = _Settings(model or demo_model(), delay_ms, concurrency, num_requests, num_rounds)
    found = _measure(settings, logs)
    table, lines = comparison_table(found), comparison_lines(found)
    return Report(
        title="A mesh from inside and from outside",
        conditions={
            "model": settings.model.name,
            "processor": processor_name(),
            "one_way_delay_ms": delay_ms,
        },
        sections=[Section("## Loads", table, table), lines_section("## Figures", lines)],
        fields={"lines": lines, "steps": found},
    )


def step_figures(report: Mapping[str, Any]) -> tuple[StepFigures, ...]:
    """From a report of `mesh bench stress`, as JSON has it.

    Raises:
        MeshError: If a check failed, or something could not be measured.
    """
    if not report["good"]:
        failed = [check["name"] for check in report["checks"] if check["holds"] is False]
        raise MeshError(f"a load failed: {'; '.join([*report['failures'], *failed])}")
    return tuple(
        StepFigures(
            step["concurrency"],
            step["tokens_per_s"],
            step["figures"]["ttft_ms"]["median"],
            step["figures"]["itl_ms"]["median"],
        )
        for step in report["steps"]
    )


def _measure(settings: _Settings, logs: Path) -> dict[str, list[StepFigures]]:
    """By view, the steps of all rounds."""
    serve = ["--speculate", "off", "--parallel", str(settings.num_slots), "--ctx-size", str(_CTX_SIZE)]
    found: dict[str, list[StepFigures]] = defaultdict(list)
    with (
        Lab(_NUM_STAGES + 1, shared=[logs, settings.model.resolve().parent]) as lab,
        LoadClient(lab) as client,
    ):
        split = even_split(read_model_facts(settings.model).n_layers, _NUM_STAGES)
        mesh = MeshSystem(lab, settings.model, logs, split=split, options=serve)
        try:
            mesh.start()
            lab.set_delay_ms(settings.delay_ms)
            for number in range(settings.num_rounds):
                for view in _ORDER:
                    report = (
                        _outside(lab, mesh, settings, logs, seed=number + 1)
                        if view == _OUTSIDE
                        else _inside(lab, client, mesh, settings, logs, seed=number + 1)
                    )
                    found[view] += step_figures(report)
                    log.info("measured", view=view, round=number + 1)
            mesh.stop()
        finally:
            mesh.kill()
    return found


def _inside(
    lab: Lab, client: LoadClient, mesh: MeshSystem, settings: _Settings, logs: Path, *, seed: int
) -> dict[str, Any]:
    plan = LoadPlan(
        preset="ramp",
        lines=(),
        contexts=(),
        concurrency=settings.concurrency,
        num_requests=settings.num_requests,
        duration_s=None,
        soak_minutes=0.0,
        soak_concurrency=1,
        num_scripts=_NUM_CHATS,
        with_clients=False,
        rounds=1,
        slos=(),
        hang_up_share=0.0,
        is_short=True,
        seed=seed,
        output=logs,
    )
    bed = LoadTestBed(client, LabMesh(lab, mesh), _CTX_SIZE, processes=mesh)
    run = LoadRun(
        plan, bed, Subject(is_exact=False, num_places=settings.num_slots, tokenizer=Tokenizer(settings.model))
    )
    run.work()
    found: dict[str, Any] = json.loads(run.report({}).json())
    return found


def _outside(lab: Lab, mesh: MeshSystem, settings: _Settings, logs: Path, *, seed: int) -> dict[str, Any]:
    argv = [COMMAND, "bench", "stress", str(settings.model), "--url", mesh.url, "--quick", "--json"]
    argv += ["--concurrency", ",".join(map(str, settings.concurrency))]
    argv += ["--requests", str(settings.num_requests), "--chats", str(_NUM_CHATS), "--seed", str(seed)]
    done = lab.exec(0, [*argv, "--output", str(logs / f"outside-{seed}")], timeout_s=_TIMEOUT_S)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise MeshError(f"mesh bench stress --url: {done.stderr.strip() or done.returncode}") from None
    return found


def comparison_table(found: Mapping[str, Sequence[StepFigures]]) -> str:
    """Every load of every step, one row for each step of each round."""
    heads = ["at once"]
    for what in ("tokens/s", "TTFT p50 ms", "ITL p50 ms"):
        heads += [f"{what}, {view}" for view in _ORDER]
    rows = []
    for views in zip(*(found[view] for view in _ORDER), strict=True):
        cells = [str(views[0].num_at_once)]
        cells += [f"{view.tokens_per_s:.1f}" for view in views]
        cells += [f"{view.ttft_ms:.0f}" for view in views]
        cells += [f"{view.itl_ms:.1f}" for view in views]
        rows.append(cells)
    return markdown_table(heads, rows)


def comparison_lines(found: Mapping[str, Sequence[StepFigures]]) -> list[Line]:
    """How far the rates from outside are from the lab's, and the lab's two loads from one another."""
    noise = _ratios(found[_LAB_AGAIN], found[_LAB])
    # The lab's loads before and after, so that a drift of the machine is in neither.
    middle = [
        geometric_mean((before.tokens_per_s, after.tokens_per_s))
        for before, after in zip(found[_LAB], found[_LAB_AGAIN], strict=True)
    ]
    ratios = [step.tokens_per_s / own for step, own in zip(found[_OUTSIDE], middle, strict=True)]
    return [
        Line(
            "tokens/s from outside, mean difference from the lab's own",
            abs(geometric_mean(ratios) - 1),
            round(max(abs(ratio - 1) for ratio in noise) + _TOLERANCE, 3),
            is_ceiling=True,
            note=f"ratios {_shown(ratios)}",
        ),
        Line(
            "tokens/s of the lab's second load, mean difference from its first",
            abs(geometric_mean(noise) - 1),
            None,
            note=f"ratios {_shown(noise)}",
        ),
    ]


def _shown(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def _ratios(steps: Sequence[StepFigures], others: Sequence[StepFigures]) -> list[float]:
    return [step.tokens_per_s / other.tokens_per_s for step, other in zip(steps, others, strict=True)]


if __name__ == "__main__":
    main()
