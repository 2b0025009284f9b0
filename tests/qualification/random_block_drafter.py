"""Random drafters of blocks with the sizes that trained ones have, for measurements of what blocks cost.

Five layers as wide as the model's own, which read five layers of the model, as z-lab's DFlash drafters do.
They compute like trained ones, and hardly ever say what the model says.

    python -m tests.qualification.random_block_drafter dspark dspark.gguf --for MODEL.gguf
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
import gguf
import numpy as np

from mesh.serve.options import demo_model
from speculative.proposer import DrafterKind
from tests.support.block_drafters import BlockDrafter

_KINDS: Final = (DrafterKind.DFLASH, DrafterKind.DSPARK, DrafterKind.DFLASH2)
_NUM_LAYERS: Final = 5
_BLOCK_SIZE: Final = 16


def trained_shape(kind: DrafterKind, target: Path) -> BlockDrafter:
    """A drafter for a model, with layers of its size."""
    fields = gguf.GGUFReader(target).fields
    architecture = fields["general.architecture"].contents()

    def size(name: str) -> int:
        return int(fields[f"{architecture}.{name}"].contents())

    # From the second layer to the last but one, which have the inputs of those behind them.
    reads = np.linspace(2, size("block_count") - 2, _NUM_LAYERS).round().astype(int)
    return BlockDrafter(
        kind,
        n_layers=_NUM_LAYERS,
        block_size=_BLOCK_SIZE,
        reads=tuple(dict.fromkeys(int(layer) for layer in reads)),
        n_heads=size("attention.head_count"),
        n_heads_kv=size("attention.head_count_kv"),
        head_size=size("embedding_length") // size("attention.head_count"),
        n_ff=size("feed_forward_length"),
    )


@click.command()
@click.argument("kind", type=click.Choice([kind.value for kind in _KINDS]))
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--for",
    "target",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The model; the demo's unless given.",
)
def main(kind: str, path: Path, target: Path | None) -> None:
    """Write a random drafter of KIND to PATH."""
    target = target or demo_model()
    trained_shape(DrafterKind[kind.upper()], target).write(target, path)


if __name__ == "__main__":
    main()
