"""`mesh draft report`, and the report of `mesh draft tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mesh.cli.shared_options import int_option, local_model, option_group
from mesh.util.printable import say
from mesh.util.terminal import progress_bars
from spanmesh_proto.errors import ModelError
from stages.files import write_atomically

if TYPE_CHECKING:
    from mesh.tuning.jobs import MeasureJob
    from mesh.tuning.report import ReportSection

_PATH: Final = click.Path(path_type=Path)
REPORT_HELP: Final = "Folder for report.md and report.json."

device_options: Final = option_group(
    int_option(
        "--torch-threads", "threads", default=1, most=1024, metavar="N", help="Threads on a processor."
    ),
    click.option(
        "--device",
        default="cpu",
        show_default=True,
        metavar="NAME",
        help="Where torch computes: cpu, cuda, cuda:1.",
    ),
)
links_option: Final = int_option(
    "--links",
    default=3,
    least=2,
    most=1024,
    metavar="N",
    help="Links that a window crosses: one more than stages.",
)


@click.command()
@click.argument("folders", type=_PATH, nargs=-1, required=True, metavar="FOLDER...")
@click.option(
    "--for",
    "target",
    type=_PATH,
    required=True,
    metavar="MODEL",
    help="The model that was recorded: a GGUF file or hf:org/repo:QUANT.",
)
@click.option(
    "--drafter",
    "drafters",
    type=_PATH,
    multiple=True,
    required=True,
    metavar="FILE",
    help="A drafter, as often as there are some; gains are over the first.",
)
@device_options
@links_option
@click.option("-o", "--output", type=_PATH, metavar="DIR", help=REPORT_HELP)
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
    from mesh.tuning.report import as_markdown  # noqa: PLC0415

    model = local_model(target).path
    files = tuple(local_model(path).path for path in drafters)
    sections = sections_on(MeasureJob(folders, model, files, Device(device, threads)), links)
    if not sections:
        raise ModelError(
            f"{', '.join(map(str, folders))}: no answer is long enough and to a prompt from which no drafter "
            "has learned; record other prompts"
        )
    text = as_markdown(f"Drafters for {model.name}", sections)
    publish(text, [section.as_dict() for section in sections], output, as_json=as_json)


def sections_on(job: MeasureJob, num_links: int) -> list[ReportSection]:
    """What drafters are worth on each of some recordings, with times on this host."""
    from mesh.tuning.report import sections_of  # noqa: PLC0415 - keeps --help quick
    from mesh.tuning.row_times import ring_times  # noqa: PLC0415
    from mesh.tuning.tuner import measure_drafters  # noqa: PLC0415

    with progress_bars() as bars:
        bar = bars.add("measuring")
        found = measure_drafters(job, lambda label, share: bar(share, label))
    times = ring_times(job.target, job.drafters, num_links - 1)
    sections: list[ReportSection] = []
    for folder in found:
        notes = []
        if folder.num_learned:
            notes.append(f"{folder.num_learned} answers to prompts that a drafter has learned are left out.")
        if folder.num_dropped:
            notes.append(f"{folder.num_dropped} conversations are damaged and left out.")
        sections += sections_of(folder.folder.name, folder.drafters, times, notes)
    return sections


def publish(text: str, fields: Any, folder: Path | None, *, as_json: bool) -> None:
    """Print a report, and write it into a folder if one is wanted."""
    written = json.dumps(fields, indent=2)
    if folder is not None:
        write_atomically(folder / "report.md", text)
        write_atomically(folder / "report.json", written + "\n")
    say(written if as_json else text)
