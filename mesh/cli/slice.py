"""`mesh slice` and `mesh draft make`."""

from __future__ import annotations

from pathlib import Path

import click

from mesh.cli.option_types import ParsedText
from mesh.cli.shared_options import local_model
from mesh.requantize import QUANT_TYPES, requantise
from mesh.util.progress import progress_bars
from spanmesh_proto.errors import ModelError
from stages.gguf.reader import read_header
from stages.layers import LayerRange


class _Layers(ParsedText[LayerRange]):
    """`A:B`, layers from A up to, not including, B."""

    name = "layers"

    def parse(self, text: str) -> LayerRange:
        try:
            start, stop = text.split(":")
            return LayerRange(int(start), int(stop))
        except ValueError:
            raise ValueError(
                f"{text!r} is not a layer range; write A:B with 0 <= A < B, B not included"
            ) from None


@click.command(name="slice")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--layers", type=_Layers(), required=True, metavar="A:B", help="Layers from A up to, not including, B."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="OUT", help="The stage file."
)
def slice_(model: Path, layers: LayerRange, output: Path) -> None:
    """Write layers A to B of MODEL as a stage: a smaller GGUF that llama.cpp loads.

    MODEL is a GGUF file, the first one if there are several, or hf:org/repo:QUANT.
    """
    from stages.certification.isolated import cut_stage  # noqa: PLC0415 - keeps --help quick

    model = local_model(model).path
    with progress_bars() as bars:
        bar = bars.add(f"cutting {model.name}, layers {layers}")
        cut_stage(model, layers, output, progress=lambda done, total: bar(done / total))
    click.echo(f"{output}: layers {layers} of {model.name}, {output.stat().st_size:,} bytes")


@click.group()
def draft() -> None:
    """Make draft models, whose proposals the served model verifies."""


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
    click.echo(f"{output}: {model.name} as {quant_type}, {after:,} bytes, {after / before:.0%} of the model")
