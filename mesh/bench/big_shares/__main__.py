"""`python -m mesh.bench.big_shares` prints what each host holds; exit code 1 if one holds too much."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mesh.bench.big_shares.run import BigSharesOptions, measure_big_shares
from mesh.bench.big_shares.shapes import SHAPES
from mesh.bench.big_shares.shares import shares_table
from mesh.placement.stage_sizes import Workload
from mesh.util.logs import set_up_logs
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from mesh.bench.big_shares.random_gguf import WeightType


@click.command()
@click.option("--shape", default="1.1b", show_default=True, type=click.Choice(list(SHAPES)))
@click.option("--type", "weight_type", default="Q4_0", show_default=True, type=click.Choice(["Q4_0", "Q8_0"]))
@click.option("--tokens", default=16, show_default=True, type=click.IntRange(1), help="Of each answer.")
@click.option(
    "--answers", default=2, show_default=True, type=click.IntRange(1, 16), help="Asked for at once."
)
@click.option("--ctx-size", default=2048, show_default=True, type=click.IntRange(256, 4096))
@click.option("--parallel", default=4, show_default=True, type=click.IntRange(1, 16))
@click.option("--exact", is_flag=True)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Keep model and logs here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    *,
    shape: str,
    weight_type: WeightType,
    tokens: int,
    answers: int,
    ctx_size: int,
    parallel: int,
    exact: bool,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Run a random model of a billion parameters over three lab hosts, and see what each of them holds."""
    set_up_logs()
    workload = Workload(ctx_size, parallel, is_exact=exact)
    options = BigSharesOptions(shape, weight_type, tokens, answers, workload, folder)
    try:
        found = measure_big_shares(options)
    except MeshError as error:
        sys.exit(f"error: {error.message}")
    is_within = all(each.is_within for each in found.footprints)
    if as_json:
        click.echo(json.dumps(asdict(found) | {"within": is_within}))
    else:
        click.echo(
            f"{SHAPES[shape].num_parameters / 1e9:.2f} billion parameters in {weight_type}, "
            f"{found.model_bytes / 1e6:.0f} MB, {found.num_tokens} tokens answered; sizes in MB\n"
        )
        click.echo(shares_table(found.footprints, found.layers))
    sys.exit(0 if is_within else 1)


if __name__ == "__main__":
    main()
