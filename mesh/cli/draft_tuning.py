"""`mesh draft tune`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mesh.cli.draft_record import answer_options
from mesh.cli.draft_report import REPORT_HELP, device_options, links_option, publish, sections_on
from mesh.cli.options import options_of
from mesh.cli.shared_options import float_option, int_option, local_model
from mesh.options.host import HeadOptions
from mesh.util.printable import say
from mesh.util.terminal import progress_bars
from spanmesh_proto.errors import ModelError

if TYPE_CHECKING:
    from mesh.tuning.jobs import TuneOutcome

_PATH: Final = click.Path(path_type=Path)
_FILE: Final = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("learned", nargs=-1, required=True, metavar="PROMPTS|own:N|FOLDER...")
@click.option(
    "--for",
    "target",
    type=_PATH,
    required=True,
    metavar="MODEL",
    help="The model: a GGUF file or hf:org/repo:QUANT.",
)
@click.option(
    "--from",
    "drafter",
    type=_PATH,
    metavar="DRAFTER",
    help="The drafter to begin with: a GGUF file or hf:org/repo:NAME; the one beside MODEL unless given.",
)
@click.option("-o", "--output", type=_FILE, required=True, metavar="OUT", help="The tuned drafter.")
@click.option(
    "--measure",
    "measured",
    multiple=True,
    metavar="PROMPTS|own:N|FOLDER",
    help="What is not learned, and stands in the report as well, such as general chat; as often as there is "
    "some.",
)
@answer_options
@options_of(HeadOptions, "record_bytes")
@int_option("--passes", default=3, most=100, metavar="N", help="How often each answer is learned.")
@float_option(
    "--minutes", default=60.0, metavar="N", help="Longest time of learning; it goes on later with --resume."
)
@int_option("--ttt", default=3, most=8, metavar="N", help="Tokens in a row that it learns to draft.")
@int_option("--batch", default=4, most=256, metavar="N", help="Answers that are learned together.")
@float_option("--rate", default=2e-4, least=1e-9, most=1.0, metavar="RATE", help="Largest rate of learning.")
@click.option(
    "--vocabulary",
    metavar="N",
    help="Tokens that can be drafted, chosen anew for the answers, or `keep` for the same ones; as many as "
    "before unless given.",
)
@device_options
@int_option("--seed", default=0, least=0, metavar="N", help="Number of the order of answers.")
@links_option
@click.option("--report", "report_folder", type=_PATH, metavar="DIR", help=REPORT_HELP)
@click.option("--resume", is_flag=True, help="Go on with the unfinished run of OUT.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tune(
    learned: tuple[str, ...],
    target: Path,
    drafter: Path | None,
    output: Path,
    *,
    measured: tuple[str, ...],
    temperature: float,
    max_tokens: int,
    parallel: int,
    record_bytes: int | None,
    passes: int,
    minutes: float,
    ttt: int,
    batch: int,
    rate: float,
    vocabulary: str | None,
    threads: int,
    device: str,
    seed: int,
    links: int,
    report_folder: Path | None,
    resume: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Tune an EAGLE-3 drafter on MODEL's own answers, and report what it was worth.

    What is no recording of `mesh draft record` are prompts, as it takes them: MODEL answers them first, which
    is recorded in a folder beside OUT. Some of the prompts are not learned: they tell when to stop, and how
    much better the new drafter is. One that is right less often than before goes into a file with the ending
    .rejected.gguf, and the exit code is 1.
    """
    from mesh.cli.draft_sources import record_missing, sources_of  # noqa: PLC0415 - keeps --help quick
    from mesh.draft.drafter import serving_command  # noqa: PLC0415
    from mesh.draft.pairs import eagle3_beside  # noqa: PLC0415
    from mesh.tuning.jobs import Device, MeasureJob, Schedule, TuneJob  # noqa: PLC0415
    from mesh.tuning.regenerate import Wanted  # noqa: PLC0415
    from mesh.tuning.report import as_markdown  # noqa: PLC0415
    from mesh.tuning.tuner import require_ready, settle  # noqa: PLC0415
    from mesh.tuning.tuner import tune as tuned  # noqa: PLC0415

    model = local_model(target).path
    start = eagle3_beside(model) if drafter is None else local_model(drafter).path
    if output.exists() and (output.samefile(start) or output.samefile(model)):
        raise ModelError(f"{output} is what the new drafter is made of: name another file")
    if output.exists() and not force:
        raise ModelError(f"{output} exists: name another file, or replace it with --force")
    size = _vocabulary(vocabulary)
    require_ready(output, is_resumed=resume)
    made = output.with_name(f"{output.name}.recording")
    sources = sources_of(learned, measured, made)
    folders = tuple(source.folder for source in sources)
    num_learned = len(learned)
    wanted = Wanted(temperature, max_tokens, parallel)
    record_missing(sources[:num_learned], model, start, wanted, record_bytes)
    # Drafts are compared with tokens that were not drawn.
    record_missing(sources[num_learned:], model, start, replace(wanted, temperature=0.0), record_bytes)
    job = TuneJob(
        folders=folders[:num_learned],
        target=model,
        drafter=start,
        output=output.absolute(),
        schedule=Schedule(passes, ttt, batch, rate, seed, minutes),
        device=Device(device, threads),
        vocabulary=size,
        is_resumed=resume,
    )
    with progress_bars() as bars:
        bar = bars.add(f"tuning {start.name}")
        outcome = tuned(job, lambda label, share: bar(share, label))
    path = settle(outcome, output, model)
    is_rejected = path != output
    sections = sections_on(MeasureJob(folders, model, (start, path), job.device), links)
    fields = {"file": str(path), "is_rejected": is_rejected, **_fields(outcome)}
    publish(
        as_markdown(f"{output.name}, tuned", sections, [_told(outcome)]),
        {**fields, "sections": [each.as_dict() for each in sections]},
        report_folder,
        as_json=as_json,
    )
    if any(source.prompts is not None for source in sources):
        say(f"{made}: the answers, which are used again by the same command, and hold texts", err=True)
    if is_rejected:
        raise ModelError(
            f"the new drafter is right less often than {start.name}, and is kept as {path}: record more, or "
            "choose a lower --rate"
        )
    if not as_json:
        say(f"{output}: {serving_command(model, output)}")


def _fields(outcome: TuneOutcome) -> dict[str, Any]:
    return {
        "learned_prompts": outcome.num_prompts,
        "learned_tokens": outcome.num_learned,
        "damaged_conversations": outcome.num_dropped,
        "vocabulary": outcome.num_own_tokens,
        "steps_of_all": outcome.num_steps,
        **asdict(outcome.state),
    }


def _told(outcome: TuneOutcome) -> str:
    state = outcome.state
    ends = {
        "passes": "all passes are done",
        "gain": "three times in a row nothing was gained",
        "minutes": "the time was over",
    }
    chosen = "chosen anew" if outcome.is_retrimmed else "as before"
    text = (
        f"It learned {outcome.num_learned:,} tokens of answers to {outcome.num_prompts} prompts in "
        f"{state.step} of {outcome.num_steps} steps, {state.num_tokens:,} tokens and {state.spent_s:.0f} s "
        f"of processor time in all; it stopped because {ends[state.stopped_by]}. The weights are those of "
        f"step {state.best_step}. It drafts {outcome.num_own_tokens:,} tokens, {chosen}."
    )
    if outcome.num_dropped:
        text += f" {outcome.num_dropped} conversations are damaged and left out."
    return text


def _vocabulary(text: str | None) -> int | None:
    if text is None:
        return None
    if text == "keep":
        return 0
    if not text.isdecimal() or not int(text):
        raise click.BadParameter(
            f"{text!r} is neither a number of tokens nor `keep`", param_hint="--vocabulary"
        )
    return int(text)
