"""`mesh bench chaos`: its options and output."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from mesh.bench.shared_options import (
    hang_ups_option,
    json_option,
    logs_option,
    model_argument,
    one_way_delay_option,
    output_option,
    report_on_sigterm,
    seed_option,
    serve_options_option,
    threads_option,
)
from mesh.cli.option_types import Names

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.qualification.chaos.faults import FaultKind
    from mesh.qualification.chaos.options import ScenarioName

# As in `mesh.qualification.chaos`, which --help is not to import.
_KINDS: tuple[FaultKind, ...] = ("first", "middle", "tail", "raylet", "cut-off", "stop", "leave")
# The acceptance table has a separate line for hosts that leave.
_LOSSES: tuple[FaultKind, ...] = ("first", "middle", "tail", "raylet", "cut-off", "stop")
_SCENARIOS: tuple[ScenarioName, ...] = ("faults", "leave", "head", "no-room")
# Former names, still accepted and not shown.
_FORMER = {"harms": "faults"}
_ANSWER_TOKENS = (64, 96, 160)
_QUICK_ANSWER_TOKENS = (32, 48, 64)
_QUESTIONS = 16
_QUICK_QUESTIONS = 6


@click.command(context_settings={"token_normalize_func": lambda name: _FORMER.get(name, name)})
@model_argument
@click.option(
    "--scenario",
    "scenarios",
    type=Names("scenario", _SCENARIOS, former=_FORMER),
    default=("faults",),
    metavar="A,B,…",
    help="Scenarios: faults, leave (each host in turn), head (killed and restarted), no-room; "
    "faults unless given.",
)
@click.option(
    "--preset",
    type=click.Choice(["acceptance"]),
    help="Every scenario, with the faults of the acceptance table.",
)
@click.option("--quick", is_flag=True, help="Few and short questions, faults in quick succession.")
@click.option(
    "--faults", "num_faults", type=click.IntRange(1), default=100, show_default=True, help="Number of faults."
)
@click.option(
    "--kinds",
    type=Names("kind of fault", _KINDS),
    metavar="A,B,…",
    help="Kinds of faults: first, middle, tail (kill -9 of that stage), raylet, cut-off, stop, "
    "leave; all unless given.",
)
@seed_option("faults, questions, sampling and disconnects")
@click.option(
    "--stages",
    "num_stages",
    type=click.IntRange(2),
    default=3,
    show_default=True,
    help="Hosts that hold layers.",
)
@click.option(
    "--spares",
    "num_spares",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Hosts without layers.",
)
@click.option(
    "--streams",
    "num_streams",
    type=click.IntRange(1, 62),
    default=8,
    show_default=True,
    help="Concurrent requests.",
)
@hang_ups_option(
    "Share of streams whose client disconnects at a random moment of the scenarios faults and leave, and asks"
    " again."
)
@one_way_delay_option
@click.option(
    "--fast",
    is_flag=True,
    help="Fast mode, whose texts are not compared with the undisturbed run.",
)
@click.option(
    "--ctx-size", type=click.IntRange(256), default=1024, show_default=True, help="Positions of one session."
)
@threads_option
@click.option(
    "--speculate",
    type=click.Choice(["auto", "off", "ngram"]),
    default="auto",
    show_default=True,
    help="Proposer.",
)
@serve_options_option
@click.option(
    "--whole-timeout-s",
    type=click.FloatRange(1.0),
    default=90.0,
    show_default=True,
    metavar="S",
    help="Time after a fault until all hosts must be back.",
)
@output_option("bench-chaos")
@logs_option
@json_option
def chaos(
    *,
    model: Path | None,
    scenarios: tuple[ScenarioName, ...],
    preset: str | None,
    quick: bool,
    num_faults: int,
    kinds: tuple[FaultKind, ...] | None,
    seed: int,
    num_stages: int,
    num_spares: int,
    num_streams: int,
    hang_up_share: float,
    delay_ms: float,
    fast: bool,
    ctx_size: int,
    num_threads: int,
    speculate: str,
    serve_options: str,
    whole_timeout_s: float,
    output: Path,
    logs: Path | None,
    is_json: bool,
) -> None:
    """Inject faults into a mesh that serves MODEL, a GGUF file, on lab hosts; without MODEL, the demo's.

    Every question is answered undisturbed first. Then a constant number of streams runs, and once all hosts
    are back, the next process is killed, stopped, cut off or told to leave. Every stream must end with the
    text and token ids of the undisturbed run; one whose client disconnected must be a prefix of them. Needs
    root. Writes report.md and report.json, and keeps the logs of the first failure. Exits with 1 if a stream
    failed or differs, the mesh did not recover, or a process is left; a pause above its bound does not count.
    """
    from mesh.qualification.chaos.options import ChaosOptions  # noqa: PLC0415
    from mesh.qualification.chaos.report import as_json, as_text  # noqa: PLC0415 - keeps --help quick
    from mesh.qualification.chaos.run import run_chaos  # noqa: PLC0415
    from mesh.serve.options import demo_model  # noqa: PLC0415

    is_acceptance = preset == "acceptance"
    wanted = _SCENARIOS if is_acceptance else scenarios
    report_on_sigterm()
    report = run_chaos(
        ChaosOptions(
            model=model or demo_model(),
            scenarios=wanted,
            num_stages=num_stages,
            num_spares=num_spares,
            delay_ms=delay_ms,
            num_streams=num_streams,
            hang_up_share=hang_up_share,
            num_faults=num_faults,
            kinds=kinds or (_LOSSES if is_acceptance else _KINDS),
            is_short=quick,
            # Files that are fetched later would count as sent again.
            awaits_replicas=not quick or "head" in wanted,
            seed=seed,
            exact=not fast,
            num_questions=_QUICK_QUESTIONS if quick else _QUESTIONS,
            answer_tokens=_QUICK_ANSWER_TOKENS if quick else _ANSWER_TOKENS,
            ctx_size=ctx_size,
            num_threads=num_threads,
            speculate=speculate,
            serve_options=tuple(shlex.split(serve_options)),
            whole_timeout_s=whole_timeout_s,
            output=output,
            logs=logs,
        )
    )
    click.echo(as_json(report) if is_json else as_text(report))
    if not is_json:
        click.echo(f"report: {output / 'report.md'}")
    if not report.is_good:
        click.get_current_context().exit(1)
