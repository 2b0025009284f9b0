"""`mesh bench chaos`: its options and output."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mesh.cli.option_types import Names

if TYPE_CHECKING:
    from mesh.qualification.chaos.faults import FaultKind
    from mesh.qualification.chaos.options import ScenarioName

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)
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
@click.argument("model", required=False, type=_FILE)
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
    "--faults", "num_faults", type=click.IntRange(1), default=100, show_default=True, help="How many."
)
@click.option(
    "--kinds",
    type=Names("kind of fault", _KINDS),
    metavar="A,B,…",
    help="Kinds of faults: first, middle, tail (kill -9 of that stage), raylet, cut-off, stop, "
    "leave; all unless given.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Seed of faults, questions, sampling and disconnects.",
)
@click.option(
    "--stages", "num_stages", type=click.IntRange(2), default=3, show_default=True, help="Hosts with layers."
)
@click.option(
    "--spares", "num_spares", type=click.IntRange(0), default=1, show_default=True, help="Hosts without."
)
@click.option(
    "--streams",
    "num_streams",
    type=click.IntRange(1, 62),
    default=8,
    show_default=True,
    help="Requests under way at any time.",
)
@click.option(
    "--hang-ups",
    "hang_up_share",
    type=click.FloatRange(0.0, 1.0),
    default=0.0,
    metavar="SHARE",
    help="Share of streams whose client disconnects at a random moment of the scenarios faults and "
    "leave, and asks again.",
)
@click.option(
    "--delay-ms",
    type=click.FloatRange(0.0),
    default=5.0,
    show_default=True,
    help="One-way delay between any two hosts.",
)
@click.option(
    "--fast",
    is_flag=True,
    help="Fast mode, whose texts are not compared with the undisturbed run.",
)
@click.option(
    "--ctx-size", type=click.IntRange(256), default=1024, show_default=True, help="Positions of one session."
)
@click.option(
    "--threads", "num_threads", type=click.IntRange(1), default=1, show_default=True, help="Of each stage."
)
@click.option(
    "--speculate",
    type=click.Choice(["auto", "off", "ngram"]),
    default="auto",
    show_default=True,
    help="Who proposes.",
)
@click.option(
    "--serve",
    "serve_options",
    default="",
    metavar="OPTIONS",
    help="More options of `mesh serve`, in one argument.",
)
@click.option(
    "--whole-timeout-s",
    type=click.FloatRange(1.0),
    default=90.0,
    show_default=True,
    metavar="S",
    help="By then all hosts are to be back after a fault.",
)
@click.option(
    "-o", "--output", type=_FOLDER, default=Path("bench-chaos"), show_default=True, help="Report folder."
)
@click.option("--logs", type=_FOLDER, help="Keep what the processes write.")
@click.option("--json", "is_json", is_flag=True, help="Print the report as JSON.")
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
    """Harm a mesh that serves MODEL, a GGUF file, on lab hosts; without MODEL, the demo's.

    Every question is answered undisturbed first. Then streams run, always as many, and again and again
    something is killed, stopped, cut off or told to leave, each time once all hosts are back. Every stream
    must end with the very text and token ids of the undisturbed run, and what came before its client hung up
    must be how they begin. Needs root. Writes report.md and report.json, and keeps the logs of the first
    failure. Exits with 1 if a stream failed or differs, the mesh did not come back, or something was left;
    pauses that are too long are figures.
    """
    from mesh.qualification.chaos.options import ChaosOptions  # noqa: PLC0415
    from mesh.qualification.chaos.report import as_json, as_text  # noqa: PLC0415 - keeps --help quick
    from mesh.qualification.chaos.run import run_chaos  # noqa: PLC0415
    from mesh.serve.options import demo_model  # noqa: PLC0415

    is_acceptance = preset == "acceptance"
    wanted = _SCENARIOS if is_acceptance else scenarios
    # With a time limit, a report of the measurements up to then is still made.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
