"""`mesh draft begin`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mesh.cli.shared_options import LayerCounts, int_option, local_model
from mesh.util.printable import say
from spanmesh_proto.errors import ModelError
from stages.files import atomic_write

if TYPE_CHECKING:
    from mesh.hub import HubReference

_PATH: Final = click.Path(path_type=Path)
_FILE: Final = click.Path(path_type=Path, dir_okay=False)
# As such files are called; a repository may have drafters of other kinds, too.
_EAGLE3: Final = "eagle"
# As it was measured, see docs/speculation.md.
_TRAINING: Final = "mesh draft tune own:250 --for {} --from {} --passes 8 --rate 1e-3 -o OUT"


@click.command()
@click.argument("model", type=_PATH, required=False)
@click.option("-o", "--output", type=_FILE, required=True, metavar="OUT", help="The drafter.")
@click.option("--untrained", is_flag=True, help="Make one of MODEL's last layer in any case.")
@int_option("--vocabulary", default=16384, metavar="N", help="Tokens that an untrained one drafts.")
@click.option(
    "--layers",
    type=LayerCounts(),
    metavar="A,B,C",
    help="Three layers whose inputs an untrained one reads, as a recording names them; llama.cpp's choice "
    "unless given.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def begin(
    model: Path | None,
    output: Path,
    *,
    untrained: bool,
    vocabulary: int,
    layers: tuple[int, ...] | None,
    force: bool,
) -> None:
    """Write an EAGLE-3 drafter for MODEL to begin with, to be served or tuned.

    It is the one in MODEL's repository at the hub, if MODEL is hf:org/repo:QUANT and the repository has one;
    for the demo's model, which MODEL is unless given, the demo's; for others an untrained one, which drafts
    nothing of use before it has learned some 40,000 tokens of answers.
    """
    from mesh.draft.drafter import serving_command  # noqa: PLC0415 - keeps --help quick
    from mesh.serve.options import demo_model  # noqa: PLC0415
    from mesh.tuning.beginning import DEMO_DRAFTER, is_of_demo, write_beginning  # noqa: PLC0415

    if output.exists() and not force:
        raise ModelError(f"{output} exists: name another file, or replace it with --force")
    path = demo_model() if model is None else local_model(model).path
    serving = serving_command(path if model is None else model, output)
    if not untrained and layers is None:
        found = [] if model is None else _in_repository(str(model))
        if len(found) > 1:
            among = ", ".join(map(str, found))
            raise ModelError(
                f"the repository of {model} has several: name one as it is, {among}, or make one with "
                "--untrained"
            )
        if found:
            _copy(local_model(Path(str(found[0]))).path, output, path)
            say(f"{output}: {found[0]}; serve it with `{serving}`")
            return
        if is_of_demo(path):
            _copy(DEMO_DRAFTER, output, path)
            say(f"{output}: the demo's trained drafter; serve it with `{serving}`")
            return
    write_beginning(output, path, vocabulary, layers)
    say(f"{output}: an untrained drafter for {path.name}; train it with `{_TRAINING.format(path, output)}`")


def _in_repository(model: str) -> list[HubReference]:
    """EAGLE-3 drafters in a model's repository at the hub, by their names; none of a file."""
    from mesh.hub import HubLibrary, is_reference, parse_reference  # noqa: PLC0415 - keeps --help quick
    from stages.weights.disk_cache import default_root  # noqa: PLC0415

    if not is_reference(model):
        return []
    found = HubLibrary(default_root()).drafters(parse_reference(model))
    return [each for each in found if _EAGLE3 in (each.wanted or "").lower()]


def _copy(drafter: Path, output: Path, model: Path) -> None:
    """Copy a drafter that fits a model.

    Raises:
        ModelError: If it does not fit, or cannot be written.
    """
    from mesh.draft.drafter import read_drafter  # noqa: PLC0415 - keeps --help quick
    from stages.slicing.model_facts import read_model_facts  # noqa: PLC0415

    read_drafter(drafter, read_model_facts(model))
    with drafter.open("rb") as source, atomic_write(output) as file:
        shutil.copyfileobj(source, file)
