"""`mesh bench`: its commands, of which those for links and speculation are here."""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import click
from rich.console import Console
from rich.table import Table

from mesh.bench.serving_cli import serve
from mesh.bench.shared_options import (
    FILE,
    end_on_sigterm,
    logs_option,
    model_argument,
    output_option,
    seed_option,
    threads_option,
)
from mesh.bench.stress.cli import stress
from mesh.cli.head_client import ask_head
from mesh.cli.option_types import Names, Numbers, choice_option, command_line, int_option
from mesh.cli.shared_options import head_options, key_of
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mesh.engine import SpeculationMode


_MB = 10**6
_TIMEOUT_S = 600.0


@click.command()
@head_options
@int_option(
    "--probes",
    most=1000,
    default=50,
    help="Number of round trips of each size on each link; more than 50 on the head only.",
)
@int_option(
    "--megabytes",
    least=0,
    most=200,
    default=8,
    metavar="MB",
    help="Megabytes sent over each link, twice, to measure its bandwidth, on the head only; 0 omits it.",
)
@click.option("--json", "is_json", is_flag=True, help="Print the figures as JSON.")
def net(url: str, api_key_file: Path | None, probes: int, megabytes: int, *, is_json: bool) -> None:
    """Measure the links between the hosts of a running mesh, over the streams that windows take.

    Every host measures its links to every other, hosts without a stage too: round trips of 64 bytes and of
    one row of hidden states, and bandwidth. Then it says what a token's round takes on the wire with the
    stages in their order, and with them in the best one. Exits with 1 if a link could not be measured.
    """
    wanted = f"/mesh/links?probes={probes}&bulk_bytes={megabytes * _MB}"
    found = ask_head(url.rstrip("/") + wanted, key_of(api_key_file), method="POST", timeout_s=_TIMEOUT_S)
    if is_json:
        click.echo(json.dumps(found, indent=2))
    else:
        print_links(found)
    if any(link["failure"] for link in found["links"]):
        click.get_current_context().exit(1)


# `--quick` cuts answers to this.
_QUICK_TOKENS = 24
_MODES: tuple[SpeculationMode, ...] = ("ngram", "draft", "auto", "replay")

# Acceptance tests of this program itself: an installed package comes without them.
_QUALIFICATION: Final = {
    "chaos": "mesh.qualification.chaos.cli:chaos",
    "fuzz": "mesh.qualification.fuzz.cli:fuzz",
    "schemas": "mesh.qualification.json_schema_cli:schemas",
}


class _BenchGroup(click.Group):
    """Imports acceptance tests by name, so that the benchmarks do without them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_QUALIFICATION])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _QUALIFICATION:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = _QUALIFICATION[cmd_name].partition(":")
        if find_spec(".".join(module.split(".")[:2])) is None:
            return _missing(cmd_name)
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


def _missing(name: str) -> click.Command:
    """Stands for an acceptance test where the package with it is not installed."""
    reason = (
        f"mesh bench {name} needs a checkout of the source: the installed package has no acceptance tests"
    )

    @click.command(name, help="Needs a checkout of the source.", add_help_option=False)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def refuse(**_arguments: object) -> NoReturn:
        raise MeshError(reason)

    refuse.context_settings = {"ignore_unknown_options": True}
    return refuse


@click.group(cls=_BenchGroup)
def bench() -> None:
    """Measure any OpenAI server, a running mesh's links, a lab of hosts (needs root), or feed bad input."""


bench.add_command(serve)
bench.add_command(stress)
bench.add_command(net)


@bench.command()
@model_argument
@choice_option(
    "--preset",
    choices=("sweep", "acceptance", "features"),
    default="sweep",
    help="What to measure: what the other options select, every line of the acceptance table, or a drafter "
    "that reads hidden states, named with --draft.",
)
@click.option(
    "--quick", is_flag=True, help="A run of about a minute: few questions, short answers, one delay."
)
@output_option("bench-spec")
@click.option(
    "--spec-bench", type=FILE, help="Spec-Bench's question.jsonl, whose categories become workloads."
)
@click.option("--workloads", metavar="A,B,…", help="Workloads to measure; all unless given.")
@click.option(
    "--proposers",
    "modes",
    type=Names("proposer", _MODES),
    default=_MODES,
    metavar="A,B,…",
    help="Proposers of a sweep; all unless given.",
)
@click.option(
    "--draft-max",
    "widths",
    type=Numbers(int, 1),
    default=(1, 2, 4, 8, 16),
    metavar="A,B,…",
    help="Draft lengths of a sweep; 1,2,4,8,16 unless given.",
)
@click.option(
    "--delay-ms",
    "delays_ms",
    type=Numbers(float, 0.0),
    default=(),
    metavar="A,B,…",
    help="One-way delays; 5,20 for a sweep unless given, the preset's own for the others.",
)
@click.option(
    "--replay-rates",
    type=Numbers(float, 0.0, 1.0),
    default=(0.75, 0.72, 0.7, 0.68, 0.66, 0.64, 0.62, 0.6),
    metavar="A,B,…",
    help="Acceptance by distance of the better drafter that --preset features measures as well, for which "
    "recorded answers with wrong tokens among them stand; 0.75,0.72,0.7,… down to 0.6 unless given.",
)
@int_option(
    "--questions",
    "per_workload",
    default=1,
    help="Questions of each workload. With 1, a category's figure is that of a single question.",
)
@int_option("--tokens", "num_tokens", least=2, default=128, help="Tokens of each answer.")
@threads_option
@click.option(
    "--draft", "draft_model", type=FILE, help="GGUF file of the draft model; made from MODEL unless given."
)
@click.option(
    "--draft-type",
    default="Q4_0",
    show_default=True,
    metavar="TYPE",
    help="Quantization of the draft model that is made; `none` makes none.",
)
@click.option("--exact", is_flag=True, help="Run every mesh in exact mode.")
@click.option(
    "--rpc/--no-rpc",
    "with_rpc",
    default=None,
    help="Also measure llama.cpp RPC; only with --preset acceptance unless given.",
)
@seed_option("Seed of random prompts and sampling.")
@logs_option()
def spec(
    *,
    model: Path | None,
    preset: Literal["sweep", "acceptance", "features"],
    quick: bool,
    output: Path,
    spec_bench: Path | None,
    workloads: str | None,
    num_tokens: int,
    per_workload: int,
    draft_model: Path | None,
    draft_type: str,
    with_rpc: bool | None,
    **given: Any,
) -> None:
    """Measure what speculation is worth for MODEL, a GGUF file; without MODEL, for the demo's.

    Three hosts with a third of the layers each and a head without layers, asked through the streaming chat
    endpoint. Writes report.md, report.json and pictures. Exits with 1 if something could not be measured.
    """
    from mesh.bench.report_tools import lines_text  # noqa: PLC0415 - keeps --help quick
    from mesh.bench.speculation_report import recommendation_text  # noqa: PLC0415
    from mesh.bench.speculation_run import SpecOptions, run_spec  # noqa: PLC0415
    from mesh.serve.options import demo_model  # noqa: PLC0415

    if quick and preset != "sweep":
        raise click.UsageError("--quick is itself a preset: leave out --preset")
    if preset in {"acceptance", "features"} and spec_bench is None:
        raise click.UsageError(
            f"--preset {preset} uses Spec-Bench's questions: name their file with --spec-bench"
        )
    if preset == "features" and draft_model is None:
        raise click.UsageError("--preset features measures a drafter: name its file with --draft")
    end_on_sigterm()
    report = run_spec(
        SpecOptions(
            model=model or demo_model(),
            draft_model=draft_model,
            draft_type=None if draft_type == "none" else draft_type,
            # Each category is asked twice where answers are quick.
            per_workload=max(per_workload, 2) if preset == "features" else per_workload,
            preset="quick" if quick else preset,
            spec_bench=spec_bench,
            workloads=tuple(workloads.split(",")) if workloads else (),
            num_tokens=min(num_tokens, _QUICK_TOKENS) if quick else num_tokens,
            with_rpc=preset == "acceptance" if with_rpc is None else with_rpc,
            output=output,
            command=command_line(click.get_current_context(), without={"output", "logs"}),
            **given,
        )
    )
    if report.lines:
        click.echo(lines_text(report.lines))
    click.echo(recommendation_text(report.recommendation, report.results.servers))
    click.echo(f"report: {output / 'report.md'}")
    for failure in report.results.failures:
        click.echo(f"not measured: {failure}", err=True)
    if report.results.failures:
        click.get_current_context().exit(1)


def print_links(found: Mapping[str, Any]) -> None:
    """Print the links, then their effect on the stages' order."""
    # What went wrong may have any brackets in it.
    console = Console(markup=False)
    if not found["links"]:
        console.print("no other host has joined: there is no link to measure", highlight=False)
        return
    hidden = f"{found['hidden_bytes']} B"
    table = Table("from", "to", "64 B ms", "p99", f"{hidden} ms", "p99", "one way ms", "MB/s")
    for link in found["links"]:
        table.add_row(link["from"], link["to"], *_figures(link))
    console.print(table)
    console.print(
        f"round trips: 64 B; one row of hidden states ({hidden}) there, 64 B back. One way: such a row",
        highlight=False,
    )
    for link in found["links"]:
        if link["failure"]:
            console.print(f"{link['from']} to {link['to']}: {link['failure']}", highlight=False)
    if found["round"]:
        _print_round(console, found["head"], found["round"])
    for wire in found["wires"]:
        _print_wire(console, wire)


def _figures(link: Mapping[str, Any]) -> list[str]:
    if link["failure"]:
        return ["-"] * 6
    small, hidden, rate = link["rtt_ms"], link["hidden_rtt_ms"], link["bytes_per_s"]
    times = (small["p50"], small["p99"], hidden["p50"], hidden["p99"], link["hop_ms"])
    return [*(f"{time:.2f}" for time in times), "-" if rate is None else f"{rate / _MB:.1f}"]


def _print_round(console: Console, head: str, found: Mapping[str, Any]) -> None:
    console.print(
        f"a token's round: {_way(head, found['order'])}: {found['order_ms']:.2f} ms", highlight=False
    )
    if found["best"] != found["order"]:
        shorter = f"shorter: {_way(head, found['best'])}: {found['best_ms']:.2f} ms"
        console.print(f"{shorter}; start `mesh serve` again to have that order", highlight=False)


def _print_wire(console: Console, wire: Mapping[str, Any]) -> None:
    if wire["proposed"] == "f32":
        return
    takes = f"takes {wire['row_transfer_ms']:.2f} ms on the wire, {wire['row_compute_ms']:.2f} ms at a stage"
    console.print(
        f"{wire['from']} to {wire['to']}: a row {takes}; `mesh serve --wire {wire['proposed']}` would help",
        highlight=False,
    )


def _way(head: str, order: list[str]) -> str:
    return " - ".join([head, *order, head])
