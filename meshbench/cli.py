"""`mesh bench`: its commands, of which those for links and speculation are here."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import click

from mesh.cli.shared_options import (
    Names,
    Numbers,
    choice_option,
    command_line,
    head_options,
    int_option,
    key_of,
)
from mesh.util.printable import say
from meshbench.experiment import experiment
from meshbench.serving_cli import serve
from meshbench.shared_options import (
    FILE,
    against_option,
    logs_option,
    model_argument,
    output_option,
    seed_option,
    threads_option,
)
from meshbench.stress.cli import stress
from meshbench.under_test.links import BULK_MB, NUM_PROBES, are_measured, measure_links, print_links
from meshbench.under_test.options import remote_options, target_of
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from mesh.engine import SpeculationMode
    from meshbench.http_client import Server
    from meshbench.report_tools import Report

# `--quick` cuts answers to this.
_QUICK_TOKENS = 24
_MODES: tuple[SpeculationMode, ...] = ("ngram", "draft", "auto", "replay")
# Parameters of the hosts and of the meshes that are started on them.
_LAB_ONLY: Final = (
    *("preset", "delays_ms", "replay_rates", "num_threads", "draft_models", "draft_type", "exact"),
    *("with_rpc", "against", "logs"),
)
_IMPORTED_WHEN_CALLED: Final = {
    "chaos": "meshbench.chaos.cli:chaos",
    "fuzz": "tests.qualification.fuzz.cli:fuzz",
    "schemas": "tests.qualification.json_schema_cli:schemas",
}
# Acceptance tests of this program itself: a checkout has them, and an installed package has not.
_CHECKOUT: Final = Path(__file__).parents[1]
_QUALIFICATION: Final = "tests.qualification"


class _BenchGroup(click.Group):
    """Imports chaos and the acceptance tests by name, so that the benchmarks do without them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_IMPORTED_WHEN_CALLED])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _IMPORTED_WHEN_CALLED:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = _IMPORTED_WHEN_CALLED[cmd_name].partition(":")
        if module.startswith(_QUALIFICATION) and not _has_qualification():
            return _missing(cmd_name)
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.command()
@head_options
@int_option(
    "--probes",
    most=1000,
    default=NUM_PROBES,
    help="Number of round trips of each size on each link; more than 50 on the head only.",
)
@int_option(
    "--megabytes",
    least=0,
    most=200,
    default=BULK_MB,
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
    found = measure_links(url.rstrip("/"), key_of(api_key_file), num_probes=probes, bulk_mb=megabytes)
    if is_json:
        say(json.dumps(found, indent=2))
    else:
        print_links(found)
    if not are_measured(found):
        click.get_current_context().exit(1)


def _has_qualification() -> bool:
    """Whether this is a checkout, of which `tests` can be imported from now on."""
    if not _CHECKOUT.joinpath(*_QUALIFICATION.split(".")).is_dir():
        return False
    if str(_CHECKOUT) not in sys.path:
        sys.path.insert(0, str(_CHECKOUT))
    return True


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
    """Measure any OpenAI server, a running mesh, its links, a lab of hosts (root), or feed bad input."""


bench.add_command(serve)
bench.add_command(stress)
bench.add_command(net)


@bench.command()
@model_argument
@remote_options
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
    default=(),
    metavar="A,B,…",
    help="Acceptance by distance of the better drafter that --preset features measures as well, for which "
    "recorded answers with wrong tokens among them stand; unless given, what is published of a drafter "
    "of blocks or an assistant, and 0.75,0.72,0.7,… down to 0.6 for others.",
)
@int_option(
    "--questions",
    "per_workload",
    default=1,
    help="Questions of each workload. With 1, a category's figure is that of a single question.",
)
@int_option("--tokens", "num_tokens", least=2, default=128, help="Tokens of each answer.")
@int_option(
    "--context",
    "context_words",
    least=0,
    default=0,
    metavar="N",
    help="Words of a text that each question follows, except prompts of random ids.",
)
@threads_option
@click.option(
    "--draft",
    "draft_models",
    type=FILE,
    multiple=True,
    help="GGUF file of the draft model; made from MODEL unless given. Of two, --preset features measures the "
    "second over the first, in turn.",
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
@against_option
@seed_option("Seed of random prompts and sampling.")
@logs_option()
@click.pass_context
@experiment
def spec(
    context: click.Context,
    /,
    *,
    model: Path | None,
    server: Server | None,
    model_name: str | None,
    api_key_file: Path | None,
    links_file: Path | None,
    preset: Literal["sweep", "acceptance", "features"],
    quick: bool,
    output: Path,
    spec_bench: Path | None,
    workloads: str | None,
    num_tokens: int,
    per_workload: int,
    context_words: int,
    draft_models: tuple[Path, ...],
    draft_type: str,
    with_rpc: bool | None,
    **given: Any,
) -> Report:
    """Measure what speculation is worth for MODEL, or the demo's; with --url, for a running mesh.

    Three hosts with a third of the layers each and a head without layers, asked through the streaming chat
    endpoint; with --url the mesh there, on any hosts. Writes report.md, report.json and pictures. Exits with
    1 if something could not be measured.
    """
    from mesh.serve.options import demo_model  # noqa: PLC0415
    from meshbench.speculation_run import (  # noqa: PLC0415 - keeps --help quick
        RemoteSpecOptions,
        SpecOptions,
        run_remote_spec,
        run_spec,
    )

    target = target_of(
        context,
        server=server,
        model=model,
        model_name=model_name,
        api_key_file=api_key_file,
        links_file=links_file,
        lab_only=_LAB_ONLY,
    )
    if quick and preset != "sweep":
        raise click.UsageError("--quick is itself a preset: leave out --preset")
    if preset in {"acceptance", "features"} and spec_bench is None:
        raise click.UsageError(
            f"--preset {preset} uses Spec-Bench's questions: name their file with --spec-bench"
        )
    if preset == "features" and not draft_models:
        raise click.UsageError("--preset features measures a drafter: name its file with --draft")
    if len(draft_models) > 1 and (preset != "features" or len(draft_models) > 2 or given["against"]):
        raise click.UsageError(
            "two drafters, and no more, are compared with --preset features, without --against"
        )
    *others, draft_model = map(Path.resolve, draft_models) if draft_models else (None,)
    questions: dict[str, Any] = {
        "preset": "quick" if quick else preset,
        "spec_bench": spec_bench,
        "workloads": tuple(workloads.split(",")) if workloads else (),
        "num_tokens": min(num_tokens, _QUICK_TOKENS) if quick else num_tokens,
        # Each category is asked twice where answers are quick.
        "per_workload": max(per_workload, 2) if preset == "features" else per_workload,
        "context_words": context_words,
        "output": output,
        "command": command_line(context, without={"output", "logs"}),
    }
    if target is not None:
        questions |= {name: given[name] for name in ("modes", "widths", "seed")}
        return run_remote_spec(RemoteSpecOptions(target=target, **questions))
    return run_spec(
        SpecOptions(
            model=model or demo_model(),
            draft_model=draft_model,
            other_draft=others[0] if others else None,
            draft_type=None if draft_type == "none" else draft_type,
            with_rpc=preset == "acceptance" if with_rpc is None else with_rpc,
            **questions,
            **given,
        )
    )
