"""Random models of plain architecture, for measurements whose text does not matter.

python -m mesh.qualification.random_model FILE.gguf --shape 1.1b
"""

from __future__ import annotations

from pathlib import Path

import click

from mesh.qualification.memory_shares import SHAPES, WeightType, write_random_gguf


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--shape", type=click.Choice(list(SHAPES)), default="1.1b", show_default=True)
@click.option("--weights", type=click.Choice(["Q4_0", "Q8_0"]), default="Q4_0", show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the weights.")
def main(path: Path, shape: str, weights: WeightType, seed: int) -> None:
    """Write a random model of the architecture `llama` to PATH."""
    write_random_gguf(path, SHAPES[shape], weights, seed=seed)


if __name__ == "__main__":
    main()
