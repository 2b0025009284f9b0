"""`mesh draft make`; the group of all commands for drafters."""

from __future__ import annotations

from pathlib import Path

import click

from mesh.cli import draft_begin, draft_check, draft_record, draft_report, draft_tuning
from mesh.cli.shared_options import local_model
from mesh.requantize import QUANT_TYPES, requantise
from mesh.util.printable import say
from mesh.util.terminal import progress_bars
from spanmesh_proto.errors import ModelError
from stages.gguf import read_header


@click.group()
def draft() -> None:
    """Make, check or tune a drafter, whose proposals the served model verifies."""


for command in (
    draft_check.check,
    draft_record.record,
    draft_begin.begin,
    draft_tuning.tune,
    draft_report.report,
):
    draft.add_command(command)


@draft.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--type",
    "quant_type",
    type=click.Choice(QUANT_TYPES, case_sensitive=False),
    default="Q4_0",
    show_default=True,
    metavar="TYPE",
    help=f"Type of the weights: {', '.join(QUANT_TYPES)}.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="OUT", help="The draft model."
)
@click.option(
    "--plain", is_flag=True, help="Requantize all weights: Q4_0 and IQ4_NL as llama.cpp makes them."
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def make(model: Path, quant_type: str, output: Path, *, plain: bool, force: bool) -> None:
    """Requantize MODEL to fewer bits: a draft model with similar predictions.

    MODEL is a GGUF file, the first one if there are several, or hf:org/repo:QUANT. What is made of it suits
    any MODEL of 8 bits or more; of a smaller one it is hardly quicker.
    """
    model = local_model(model).path
    if output.exists():
        if not force:
            raise ModelError(f"{output} exists: name another file, or replace it with --force")
        if output.samefile(model):
            raise ModelError(f"{output} is the model itself: name another file")
    with progress_bars() as bars:
        bar = bars.add(f"writing {model.name} as {quant_type}")
        requantise(model, quant_type, output, is_plain=plain, progress=bar)
    before, after = read_header(model).file_bytes, output.stat().st_size
    say(f"{output}: {model.name} as {quant_type}, {after:,} bytes, {after / before:.0%} of the model")
