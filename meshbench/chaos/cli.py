"""`mesh bench chaos`: its options and output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mesh.cli.shared_options import Names, choice_option, float_option, int_option
from meshbench import shared_options
from meshbench.chaos.fault_kinds import ALL_KINDS, LISTED, LOSSES, SCENARIOS
from meshbench.experiment import experiment

if TYPE_CHECKING:
    from pathlib import Path

    from meshbench.chaos.fault_kinds import FaultKind
    from meshbench.report_tools import Report

# Former names, still accepted and not shown.
_FORMER = {"harms": "faults"}
_ANSWER_TOKENS = (64, 96, 160)
_QUICK_ANSWER_TOKENS = (32, 48, 64)
_QUESTIONS = 16
_QUICK_QUESTIONS = 6


@click.command(context_settings={"token_normalize_func": lambda name: _FORMER.get(name, name)})
@shared_options.model_argument
@click.option(
    "--scenario",
    "scenarios",
    type=Names("scenario", SCENARIOS, former=_FORMER),
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
@int_option("--faults", "num_faults", default=100, help="Number of faults.")
@click.option(
    "--kinds",
    type=Names("kind of fault", ALL_KINDS),
    metavar="A,B,…",
    help=f"Kinds of faults: {LISTED}; all unless given.",
)
@shared_options.seed_option("Seed of faults, questions, sampling and disconnects.")
@int_option("--stages", "num_stages", least=2, default=3, help="Hosts that hold layers.")
@int_option("--spares", "num_spares", least=0, default=1, help="Hosts without layers.")
@int_option("--streams", "num_streams", most=62, default=8, help="Concurrent requests.")
@shared_options.hang_ups_option(
    "Share of streams whose client disconnects at a random moment of the scenarios faults and leave, and "
    "asks again."
)
@shared_options.network_options
@click.option(
    "--fast",
    is_flag=True,
    help="Fast mode, whose texts are not compared with the undisturbed run.",
)
@int_option("--ctx-size", least=256, default=1024, help="Positions of one session.")
@shared_options.threads_option
@choice_option("--speculate", choices=("auto", "off", "ngram"), default="auto", help="Proposer.")
@shared_options.serve_option
@shared_options.against_option
@float_option(
    "--whole-timeout-s",
    least=1.0,
    default=90.0,
    metavar="S",
    help="Time after a fault until all hosts must be back.",
)
@shared_options.output_option("bench-chaos")
@shared_options.logs_option()
@shared_options.json_option
@experiment
def chaos(
    *,
    model: Path | None,
    scenarios: tuple[str, ...],
    preset: str | None,
    quick: bool,
    kinds: tuple[FaultKind, ...] | None,
    fast: bool,
    output: Path,
    **given: Any,
) -> Report:
    """Inject faults into a mesh that serves MODEL, a GGUF file, on lab hosts; without MODEL, the demo's.

    Every question is answered undisturbed first. Then a constant number of streams runs, and once all hosts
    are back, the next process is killed, stopped, cut off or told to leave. Every stream must end with the
    text and token ids of the undisturbed run; one whose client disconnected must be a prefix of them. Needs
    root. Writes report.md and report.json, and keeps the logs of the first failure. Exits with 1 if a stream
    failed or differs, the mesh did not recover, or a process is left; a pause above its bound does not count.
    """
    from mesh.serve.options import demo_model  # noqa: PLC0415
    from meshbench.chaos.options import ChaosOptions  # noqa: PLC0415 - keeps --help quick
    from meshbench.chaos.run import run_chaos  # noqa: PLC0415

    is_acceptance = preset == "acceptance"
    wanted = SCENARIOS if is_acceptance else scenarios
    return run_chaos(
        ChaosOptions(
            model=model or demo_model(),
            scenarios=wanted,
            kinds=kinds or (LOSSES if is_acceptance else ALL_KINDS),
            is_short=quick,
            # Files that are fetched later would count as sent again.
            awaits_replicas=not quick or "head" in wanted,
            exact=not fast,
            num_questions=_QUICK_QUESTIONS if quick else _QUESTIONS,
            answer_tokens=_QUICK_ANSWER_TOKENS if quick else _ANSWER_TOKENS,
            output=output,
            **given,
        )
    )
