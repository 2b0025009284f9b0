"""`mesh draft begin`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from mesh.cli.shared_options import LayerCounts, int_option, local_model
from mesh.util.printable import say
from spanmesh_proto.errors import ModelError

_PATH: Final = click.Path(path_type=Path)


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
