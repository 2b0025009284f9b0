"""`mesh bench`: measurements, most of them on a lab of several hosts on this machine."""

from __future__ import annotations

import importlib
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NoReturn

import click

from mesh.cli.option_types import Numbers, command_line
from mesh.commands.bench_net import net
from mesh.commands.bench_serve import serve
from mesh.commands.bench_stress import stress
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from mesh.engine import SpeculationMode

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)
# `--quick` cuts answers to this.
_QUICK_TOKENS = 24
_MODES: tuple[SpeculationMode, ...] = ("ngram", "draft", "auto", "replay")


class _Modes(click.ParamType[tuple["SpeculationMode", ...]]):
    """`ngram,auto`."""

    name = "proposers"

    def convert(
        self,
        value: str | tuple[SpeculationMode, ...],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[SpeculationMode, ...]:
        if isinstance(value, tuple):
            return value
        names = value.split(",")
        unknown = [name for name in names if name not in _MODES]
        if unknown:
            self.fail(f"{unknown[0]!r} is no proposer; there are {', '.join(_MODES)}", param, ctx)
        return tuple(mode for mode in _MODES if mode in names)


# Acceptance tests of this program itself: an installed package comes without them.
_QUALIFICATION: Final = {
    "chaos": "mesh.commands.bench_chaos:chaos",
    "fuzz": "mesh.commands.bench_fuzz:fuzz",
    "schemas": "mesh.commands.bench_schemas:schemas",
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
@click.argument("model", required=False, type=_FILE)
@click.option(
    "--preset",
    type=click.Choice(["sweep", "acceptance"]),
    default="sweep",
    show_default=True,
    help="What is measured: what the other options say, or every line of the acceptance table.",
)
@click.option("--quick", is_flag=True, help="A minute's look: few questions, short answers, one delay.")
@click.option(
    "-o", "--output", type=_FOLDER, default=Path("bench-spec"), show_default=True, help="Report folder."
)
@click.option(
    "--spec-bench", type=_FILE, help="Spec-Bench's question.jsonl; adds its categories as workloads."
)
@click.option("--workloads", metavar="A,B,…", help="Which; all unless given.")
@click.option(
    "--proposers",
    "modes",
    type=_Modes(),
    default=_MODES,
    metavar="A,B,…",
    help="Which, for a sweep; all unless given.",
)
@click.option(
    "--draft-max",
    "widths",
    type=Numbers(int, 1),
    default=(1, 2, 4, 8, 16),
    metavar="A,B,…",
    help="For a sweep; 1,2,4,8,16 unless given.",
)
@click.option(
    "--delay-ms",
    "delays_ms",
    type=Numbers(float, 0.0),
    default=(),
    metavar="A,B,…",
    help="One way; for a sweep 5,20 unless given, for the acceptance table all of its own.",
)
@click.option(
    "--questions",
    "per_workload",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Of each workload. With one, a category's figure is that of a single question.",
)
@click.option(
    "--tokens", "num_tokens", type=click.IntRange(2), default=128, show_default=True, help="Of each answer."
)
@click.option(
    "--threads", "num_threads", type=click.IntRange(1), default=1, show_default=True, help="Of each stage."
)
@click.option("--draft", "draft_model", type=_FILE, help="A GGUF that drafts; made from MODEL unless given.")
@click.option(
    "--draft-type",
    default="Q4_0",
    show_default=True,
    metavar="TYPE",
    help="Of the draft model that is made; `none` makes none.",
)
@click.option("--exact", is_flag=True, help="Meshes in exact mode throughout.")
@click.option(
    "--rpc/--no-rpc",
    "with_rpc",
    default=None,
    help="Measure llama.cpp RPC beside; only with --preset acceptance unless given.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=1, show_default=True, help="Of random prompts and sampling."
)
@click.option("--logs", type=_FOLDER, help="Keep what the servers write.")
def spec(
    *,
    model: Path | None,
    preset: Literal["sweep", "acceptance"],
    quick: bool,
    output: Path,
    spec_bench: Path | None,
    workloads: str | None,
    modes: tuple[SpeculationMode, ...],
    widths: tuple[int, ...],
    delays_ms: tuple[float, ...],
    per_workload: int,
    num_tokens: int,
    num_threads: int,
    draft_model: Path | None,
    draft_type: str,
    exact: bool,
    with_rpc: bool | None,
    seed: int,
    logs: Path | None,
) -> None:
    """Measure what speculation is worth for MODEL, a GGUF file; without MODEL, for the demo's.

    Three hosts with a third of the layers each and a head without layers, asked through the streaming chat
    endpoint. Writes report.md, report.json and pictures. Exits with 1 if something could not be measured.
    """
    from mesh.bench.spec.markdown import lines_text, recommendation_text  # noqa: PLC0415 - keeps --help quick
    from mesh.bench.spec.run import SpecOptions, run_spec  # noqa: PLC0415
    from mesh.serve.options import demo_model  # noqa: PLC0415

    if quick and preset != "sweep":
        raise click.UsageError("--quick is a preset of its own: leave out --preset")
    if preset == "acceptance" and spec_bench is None:
        raise click.UsageError("--preset acceptance asks Spec-Bench's questions: name them with --spec-bench")
    # Whoever sets a time limit gets what was measured until then.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = run_spec(
        SpecOptions(
            model=model or demo_model(),
            draft_model=draft_model,
            draft_type=None if draft_type == "none" else draft_type,
            preset="quick" if quick else preset,
            spec_bench=spec_bench,
            workloads=tuple(workloads.split(",")) if workloads else (),
            modes=modes,
            widths=widths,
            delays_ms=delays_ms,
            per_workload=per_workload,
            num_tokens=min(num_tokens, _QUICK_TOKENS) if quick else num_tokens,
            num_threads=num_threads,
            exact=exact,
            with_rpc=preset == "acceptance" if with_rpc is None else with_rpc,
            seed=seed,
            output=output,
            logs=logs,
            command=command_line(click.get_current_context(), without={"output", "logs"}),
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
