"""`mesh draft begin`, `mesh draft tune` and `mesh draft report`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mesh.cli.shared_options import LayerCounts, float_option, int_option, local_model
from mesh.util.printable import say
from mesh.util.terminal import progress_bars
from spanmesh_proto.errors import ModelError
from stages.files import write_atomically

if TYPE_CHECKING:
    from mesh.tuning.jobs import TuneOutcome
    from mesh.tuning.report import ReportSection

_PATH: Final = click.Path(path_type=Path)
_TARGET_HELP: Final = "The model that was recorded: a GGUF file or hf:org/repo:QUANT."
_DEVICE_HELP: Final = "Where torch computes: cpu, cuda, cuda:1."


@click.command()
@click.argument("model", type=_PATH)
@click.option("-o", "--output", type=_PATH, required=True, metavar="OUT", help="The drafter.")
@int_option("--vocabulary", default=16384, metavar="N", help="Tokens that can be drafted.")
@click.option(
    "--layers",
    type=LayerCounts(),
    metavar="A,B,C",
    help="Three layers whose inputs it reads, as a recording names them; llama.cpp's choice unless given.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def begin(model: Path, output: Path, *, vocabulary: int, layers: tuple[int, ...] | None, force: bool) -> None:
    """Write an untrained EAGLE-3 drafter for MODEL, to be tuned.

    It is made of MODEL's last layer, and drafts nothing of use before some 100,000 tokens of answers were
    learned. A trained drafter is a much better beginning: look for one at the hub first.
    """
    from mesh.tuning.beginning import write_beginning  # noqa: PLC0415 - keeps --help quick

    if output.exists() and not force:
        raise ModelError(f"{output} exists: name another file, or replace it with --force")
    path = local_model(model).path
    write_beginning(output, path, vocabulary, layers)
    say(f"{output}: an untrained drafter for {path.name}; tune it with `mesh draft tune --from {output}`")


@click.command()
@click.argument("folders", type=_PATH, nargs=-1, required=True, metavar="FOLDER...")
@click.option("--for", "target", type=_PATH, required=True, metavar="MODEL", help=_TARGET_HELP)
@click.option(
    "--from",
    "drafter",
    type=_PATH,
    metavar="DRAFTER",
    help="The drafter to begin with: a GGUF file or hf:org/repo:NAME; the one beside MODEL unless given.",
)
@click.option("-o", "--output", type=_PATH, required=True, metavar="OUT", help="The tuned drafter.")
@int_option("--passes", default=3, most=100, metavar="N", help="How often each answer is learned.")
@float_option(
    "--minutes", default=60.0, metavar="N", help="Longest time; more is learned later with --resume."
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
@int_option("--torch-threads", "threads", default=1, most=1024, metavar="N", help="Threads on a processor.")
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help=_DEVICE_HELP)
@int_option("--seed", default=0, least=0, metavar="N", help="Number of the order of answers.")
@click.option("--resume", is_flag=True, help="Go on with the unfinished run of OUT.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tune(
    folders: tuple[Path, ...],
    target: Path,
    drafter: Path | None,
    output: Path,
    *,
    passes: int,
    minutes: float,
    ttt: int,
    batch: int,
    rate: float,
    vocabulary: str | None,
    threads: int,
    device: str,
    seed: int,
    resume: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Tune an EAGLE-3 drafter on recorded answers of MODEL.

    Each FOLDER is a recording of `mesh draft record`. Some of its prompts are not learned: they tell when to
    stop, and how much better the new drafter is. One that is right less often than before goes into a file
    with the ending .rejected.gguf, and the exit code is 1.
    """
    from mesh.draft.pairs import eagle3_beside  # noqa: PLC0415 - keeps --help quick
    from mesh.tuning.jobs import Device, Schedule, TuneJob  # noqa: PLC0415
    from mesh.tuning.tuner import tune as tuned  # noqa: PLC0415

    model = local_model(target).path
    start = eagle3_beside(model) if drafter is None else local_model(drafter).path
    if output.exists() and (output.samefile(start) or output.samefile(model)):
        raise ModelError(f"{output} is what the new drafter is made of: name another file")
    if output.exists() and not force:
        raise ModelError(f"{output} exists: name another file, or replace it with --force")
    job = TuneJob(
        folders=folders,
        target=model,
        drafter=start,
        output=output.absolute(),
        schedule=Schedule(passes, ttt, batch, rate, seed, minutes),
        device=Device(device, threads),
        vocabulary=_vocabulary(vocabulary),
        is_resumed=resume,
    )
    with progress_bars() as bars:
        bar = bars.add(f"tuning {start.name}")
        outcome = tuned(job, lambda label, share: bar(share, label))
    _finish(job.output, outcome, model, as_json=as_json)


@click.command()
@click.argument("folders", type=_PATH, nargs=-1, required=True, metavar="FOLDER...")
@click.option("--for", "target", type=_PATH, required=True, metavar="MODEL", help=_TARGET_HELP)
@click.option(
    "--drafter",
    "drafters",
    type=_PATH,
    multiple=True,
    required=True,
    metavar="FILE",
    help="A drafter, as often as there are some; gains are over the first.",
)
@int_option("--torch-threads", "threads", default=1, most=1024, metavar="N", help="Threads on a processor.")
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help=_DEVICE_HELP)
@int_option(
    "--links",
    default=3,
    least=2,
    most=1024,
    metavar="N",
    help="Links that a window crosses: one more than stages.",
)
@click.option("-o", "--output", type=_PATH, metavar="DIR", help="Folder for report.md and report.json.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def report(
    folders: tuple[Path, ...],
    target: Path,
    drafters: tuple[Path, ...],
    *,
    threads: int,
    device: str,
    links: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Compare drafters on recorded answers of MODEL.

    Each FOLDER is a recording of `mesh draft record`. Prompts from which one of the drafters has learned are
    left out. Tokens a second are computed from times on this host.
    """
    from mesh.tuning.jobs import Device, MeasureJob  # noqa: PLC0415 - keeps --help quick
    from mesh.tuning.report import as_markdown, sections_of  # noqa: PLC0415
    from mesh.tuning.row_times import ring_times  # noqa: PLC0415
    from mesh.tuning.tuner import measure_drafters  # noqa: PLC0415

    model = local_model(target).path
    files = tuple(local_model(path).path for path in drafters)
    with progress_bars() as bars:
        bar = bars.add("measuring")
        job = MeasureJob(folders, model, files, Device(device, threads))
        found = measure_drafters(job, lambda label, share: bar(share, label))
    times = ring_times(model, files, links - 1)
    sections: list[ReportSection] = []
    for folder in found:
        notes = []
        if folder.num_learned:
            notes.append(f"{folder.num_learned} answers to prompts that a drafter has learned are left out.")
        if folder.num_dropped:
            notes.append(f"{folder.num_dropped} conversations are damaged and left out.")
        sections += sections_of(folder.folder.name, folder.drafters, times, notes)
    if not sections:
        raise ModelError(
            f"{', '.join(map(str, folders))}: no answer is long enough and to a prompt from which no drafter "
            "has learned; record other prompts"
        )
    text = as_markdown(f"Drafters for {model.name}", sections)
    fields = json.dumps([section.as_dict() for section in sections], indent=2)
    if output is not None:
        write_atomically(output / "report.md", text)
        write_atomically(output / "report.json", fields + "\n")
    say(fields if as_json else text)


def _finish(output: Path, outcome: TuneOutcome, model: Path, *, as_json: bool) -> None:
    """Give the new drafter its name, and print the report.

    Raises:
        ModelError: If it cannot draft, or if it is worse than before.
    """
    from mesh.draft.drafter import serving_command  # noqa: PLC0415 - keeps --help quick
    from mesh.tuning.report import as_markdown, sections_of  # noqa: PLC0415
    from mesh.tuning.tuner import settle  # noqa: PLC0415

    path = settle(outcome, output, model)
    is_rejected = path != output
    sections = sections_of("Held-out prompts", [outcome.before, outcome.after], [None, None])
    if as_json:
        said = {"file": str(path), "is_rejected": is_rejected, **_fields(outcome)}
        say(json.dumps({**said, "sections": [each.as_dict() for each in sections]}, indent=2))
    else:
        say(as_markdown(f"{output.name}, tuned", sections, [_told(outcome)]))
    if is_rejected:
        raise ModelError(
            f"the new drafter is right less often than {outcome.before.name}, and is kept as {path}: record "
            "more, or choose a lower --rate"
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
