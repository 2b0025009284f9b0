"""`mesh slice`."""

from __future__ import annotations

from pathlib import Path

import click

from mesh.cli.shared_options import ParsedText, local_model
from mesh.util.printable import say
from mesh.util.terminal import progress_bars
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
    from stages.certification.certify import cut_stage  # noqa: PLC0415 - keeps --help quick

    model = local_model(model).path
    with progress_bars() as bars:
        bar = bars.add(f"cutting {model.name}, layers {layers}")
        cut_stage(model, layers, output, progress=lambda done, total: bar(done / total))
    say(f"{output}: layers {layers} of {model.name}, {output.stat().st_size:,} bytes")
