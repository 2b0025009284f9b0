"""Accuracy of the forecast of `mesh plan` against measurements.

Four hosts in the lab: a head without layers and three with a share each; one thread a stage, greedy, no
speculation, one request at a time. At each delay `mesh plan --url` is run on the head first, as a user would;
then prompts are asked, and the median of their decode rates is held against the prediction. Where they
differ, the table shows of what: what stages computed by their own clocks against what they were expected to,
and what a token took beyond that and the links' measured times: `cost_model.HANDLING_MS` stands for it.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mesh.cli.shared_options import Numbers
from mesh.forecast.cost_model import HANDLING_MS
from mesh.placement.context_choice import least_context
from mesh.serve.options import demo_model
from meshbench.datasets import load_prompts
from meshbench.experiment import lab_experiment
from meshbench.lab.network import Lab
from meshbench.lab.systems import COMMAND, MeshSystem
from meshbench.load_client.client import LoadClient
from meshbench.load_client.schedule import Request
from meshbench.report_tools import Report, Section, markdown_table
from meshbench.shared_options import FILE, logs_option
from spanmesh_proto.errors import MeshError
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_HOSTS: Final = 4
# Predicted tokens per second are to be within this share of measured ones.
MOST_OFF: Final = 0.2
_DELAYS_MS: Final = (0.1, 5.0, 20.0)
# About where the middle of an answer is: a short question, a chat template, half of the tokens.
_PROMPT_TOKENS: Final = 96
_PLAN_TIMEOUT_S: Final = 180.0


@dataclass(frozen=True)
class DelayCheck:
    """At one delay."""

    delay_ms: float
    """One way."""
    predicted: dict[str, Any]
    """What `mesh plan` said, as its JSON has it."""
    tokens_per_s: float
    """Measured, median over the answers."""
    compute_ms: float
    """Measured, of a token, by the stages' clocks."""
    queue_ms: float
    """Likewise, waiting at the stages."""
    ttft_ms: float
    """Measured, median."""
    num_stages: int
    """Of the ring."""

    @property
    def ratio(self) -> float:
        """Predicted by measured."""
        return float(self.predicted["tokens_per_s"]) / self.tokens_per_s

    @property
    def is_close(self) -> bool:
        """Whether the prediction is good enough."""
        return abs(self.ratio - 1) <= MOST_OFF

    @property
    def handling_ms(self) -> float:
        """Per stage, and once for the coordinator: what neither computing nor links explain."""
        rest_ms = 1e3 / self.tokens_per_s - self.compute_ms - float(self.predicted["wire_ms"])
        return rest_ms / (self.num_stages + 1)


@click.command()
@click.option("--model", type=FILE, help="The demo's model unless given.")
@click.option("--delay-ms", "delays_ms", type=Numbers(float, 0.0), default=_DELAYS_MS, metavar="A,B,…")
@click.option("--prompts", "num_prompts", default=4, show_default=True, help="How many.")
@click.option("--tokens", "num_tokens", default=128, show_default=True, help="Of each answer.")
@click.option("--threads", "num_threads", default=1, show_default=True, help="Of each stage.")
@click.option("--exact", is_flag=True, help="In exact mode.")
@logs_option()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write figures.")
@lab_experiment
def main(
    *,
    model: Path | None,
    delays_ms: tuple[float, ...],
    num_prompts: int,
    num_tokens: int,
    num_threads: int,
    exact: bool,
    logs: Path,
    json_path: Path | None,
) -> Report:
    """Hold predictions against measurements in the lab; exits with 1 if one is off by more than a fifth."""
    model = model or demo_model()
    sizes = ["--ctx-size", str(least_context(read_model_facts(model).n_ctx_train))]
    checks = _run(
        model,
        delays_ms,
        load_prompts(None, num_prompts),
        num_tokens=num_tokens,
        num_threads=num_threads,
        options=[*sizes, *["--exact"] * exact],
        logs=logs,
    )
    if json_path is not None:
        figures = [asdict(check) | {"ratio": check.ratio} for check in checks]
        json_path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    table = report(checks)
    is_good = all(check.is_close for check in checks)
    return Report(title="Forecasts", sections=[Section("", table, table)], is_good=is_good)


def report(checks: Sequence[DelayCheck]) -> str:
    """A table, a line for each delay."""
    heads = (
        "delay",
        "predicted",
        "measured",
        "ratio",
        "computing",
        "wire",
        "handling a stage",
        "first token",
    )
    return markdown_table(
        heads,
        [
            (
                f"{check.delay_ms:g} ms",
                f"{check.predicted['tokens_per_s']:.1f} tokens/s",
                f"{check.tokens_per_s:.1f} tokens/s",
                f"{check.ratio:.2f}{'' if check.is_close else ' (!)'}",
                f"{check.predicted['compute_ms']:.1f}, was {check.compute_ms:.1f} ms",
                f"{check.predicted['wire_ms']:.1f} ms",
                f"{HANDLING_MS:.2f}, was {check.handling_ms:.2f} ms",
                f"{check.predicted['ttft_ms']:.0f}, was {check.ttft_ms:.0f} ms",
            )
            for check in checks
        ],
    )


def _run(
    model: Path,
    delays_ms: Sequence[float],
    prompts: Sequence[str],
    *,
    num_tokens: int,
    num_threads: int,
    options: list[str],
    logs: Path,
) -> list[DelayCheck]:
    with Lab(NUM_HOSTS, shared=[logs, model.resolve().parent]) as lab, LoadClient(lab) as client:
        serve = ["--speculate", "off", "--parallel", "1", *options]
        mesh = MeshSystem(lab, model, logs, num_threads=num_threads, options=serve)
        try:
            mesh.start()
            requests = tuple(Request.chat(prompt, num_tokens, mesh.fields) for prompt in prompts)
            prefills = tuple(Request.chat(prompt, 1, mesh.fields) for prompt in prompts)
            # Nothing measured is a first time.
            client.answer(mesh.url, requests[:1])
            checks = []
            for delay_ms in delays_ms:
                lab.set_delay_ms(delay_ms)
                predicted = _predict(lab, mesh, model, options)
                start = mesh.stage_totals()
                client.answer(mesh.url, prefills)
                prefilled = mesh.stage_totals()
                answers = client.answer(mesh.url, requests).answers
                # Of tokens alone: the prompts were computed twice.
                times = (mesh.stage_totals() - prefilled - (prefilled - start)).per_window()
                checks.append(
                    DelayCheck(
                        delay_ms=delay_ms,
                        predicted=predicted,
                        tokens_per_s=statistics.median(answer.tokens_per_s for answer in answers),
                        compute_ms=times.compute_ms,
                        queue_ms=times.queue_ms,
                        ttft_ms=statistics.median(answer.ttft_ms for answer in answers),
                        num_stages=mesh.num_stages,
                    )
                )
            mesh.stop()
        finally:
            mesh.kill()
    return checks


def _predict(lab: Lab, mesh: MeshSystem, model: Path, options: list[str]) -> dict[str, Any]:
    argv = [COMMAND, "plan", str(model), "--url", mesh.url, "--json"]
    argv += ["--stages", str(mesh.num_stages), "--parallel", "1", "--prompt-tokens", str(_PROMPT_TOKENS)]
    done = lab.exec(0, [*argv, *options], timeout_s=_PLAN_TIMEOUT_S)
    if done.returncode != 0:
        raise MeshError(f"mesh plan: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    if found["prediction"] is None:
        raise MeshError(f"mesh plan: {found['basis']}")
    prediction: dict[str, Any] = found["prediction"]
    return prediction


if __name__ == "__main__":
    main()
