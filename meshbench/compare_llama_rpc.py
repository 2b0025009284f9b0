"""Command that compares a mesh with llama.cpp's RPC server.

Four hosts in the lab: a head without layers and three with a third of them each; one thread a stage, greedy,
no speculation, the same prompts through the same streaming chat endpoint. In each round both sides answer all
prompts, one side after the other; see `meshbench.paired_systems`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mesh.cli.shared_options import Numbers
from mesh.serve.options import demo_model
from meshbench.datasets import load_prompts
from meshbench.experiment import lab_experiment
from meshbench.lab.network import Lab
from meshbench.load_client.client import LoadClient
from meshbench.paired_systems import Contest, Settings, side_by_side
from meshbench.report_tools import Report, Section
from meshbench.shared_options import FILE, logs_option
from stages.process_limits import processor_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshbench.paired_systems import Comparison

NUM_HOSTS: Final = 4


@click.command()
@click.option("--model", type=FILE, help="The demo's model unless given.")
@click.option(
    "--delay-ms",
    "delays_ms",
    type=Numbers(float, 0.0),
    default=(5.0, 20.0),
    metavar="A,B,…",
    help="One-way delays; 5,20 unless given.",
)
@click.option("--prompts", "num_prompts", default=4, show_default=True, help="How many.")
@click.option(
    "--prompt-file",
    type=FILE,
    help="Spec-Bench's question.jsonl, whose chat questions are used; a few built-in questions unless given.",
)
@click.option("--tokens", "num_tokens", default=128, show_default=True, help="Of each answer.")
@click.option("--rounds", "num_rounds", default=3, show_default=True)
@click.option("--threads", "num_threads", default=1, show_default=True, help="Of each stage.")
@click.option("--exact", is_flag=True, help="Run the mesh in exact mode.")
@logs_option()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write figures.")
@lab_experiment
def main(
    *,
    model: Path | None,
    delays_ms: tuple[float, ...],
    num_prompts: int,
    prompt_file: Path | None,
    num_tokens: int,
    num_rounds: int,
    num_threads: int,
    exact: bool,
    logs: Path,
    json_path: Path | None,
) -> Report:
    """Compare decode rates with llama.cpp RPC in the lab; exits 0 whatever it finds."""
    settings = Settings(
        model=model or demo_model(),
        prompts=load_prompts(prompt_file, num_prompts),
        num_tokens=num_tokens,
        num_rounds=num_rounds,
        num_threads=num_threads,
        exact=exact,
    )
    comparisons = _run(settings, delays_ms, logs)
    report = Report(
        title="The mesh beside llama.cpp RPC",
        conditions={"model": settings.model.name, "processor": processor_name()},
        sections=[
            *(Section("", "", comparison.report()) for comparison in comparisons),
            Section("", "", f"tokens/s of one request:\n{side_by_side(comparisons)}"),
        ],
        fields=_figures(comparisons),
    )
    if json_path is not None:
        json_path.write_text(report.json() + "\n", encoding="utf-8")
    return report


def _run(settings: Settings, delays_ms: Sequence[float], logs: Path) -> list[Comparison]:
    with Lab(NUM_HOSTS, shared=[logs, settings.model.resolve().parent]) as lab, LoadClient(lab) as client:
        contest = Contest(lab, client, settings, logs)
        contest.start()
        comparisons = []
        try:
            for kernels in contest.kernels:
                with contest.mesh(kernels) as mesh:
                    comparisons += [contest.measure(mesh, kernels, delay_ms) for delay_ms in delays_ms]
        finally:
            contest.stop()
        return comparisons


def _figures(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    delays = [
        {
            **asdict(comparison),
            "mesh_tokens_per_s": comparison.mesh_tokens_per_s,
            "rpc_tokens_per_s": comparison.peer_tokens_per_s,
            "ratio": comparison.ratio,
            "ratios": comparison.ratios,
            "overhead_ms": comparison.overhead_ms,
            "slower_compute_ms": comparison.slower_compute_ms,
            "transport_ms": comparison.transport_ms,
        }
        for comparison in comparisons
    ]
    return {"delays": delays}


if __name__ == "__main__":
    main()
