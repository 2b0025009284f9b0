"""Command that measures how weights are cut and transferred.

The model is made on the spot and is mostly holes, so that 60 GB of it take some hundred megabytes of disk; a
model without holes is cut besides, and compared with a plain copy. One layer travels to a host that is killed
over and over, and to one whose bytes turn. Everything is removed afterwards.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from random import Random

import click

from mesh.cli.shared_options import MemorySize
from stages.layers import LayerRange
from tests.qualification.weights.slicing import MOST_RSS_BYTES, CuttingReport, measure_cutting
from tests.qualification.weights.transfer import TransferReport, disrupt_transfers


@click.command()
@click.option("--size", type=MemorySize(), default="60G", show_default=True, help="Of the sparse model.")
@click.option("--dense", type=MemorySize(), default="2G", show_default=True, help="Of the dense model.")
@click.option("--kills", default=20, show_default=True, help="How often the transfer is killed.")
@click.option(
    "--rate", type=MemorySize(), default="100M", show_default=True, help="Bytes a second of the transfer."
)
@click.option("--seed", default=1, show_default=True, help="Of everything that is random.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the files go for a while.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    *, size: int, dense: int, kills: int, rate: int, seed: int, folder: Path | None, as_json: bool
) -> None:
    """Measure and prove; exit code 1 if anything does not hold."""
    with tempfile.TemporaryDirectory(prefix="spanmesh-weights-", dir=folder) as name:
        place = Path(name)
        cutting = measure_cutting(place, size, dense, seed)
        if not as_json:
            _print_cutting(cutting)
        middle = LayerRange(cutting.num_layers // 2, cutting.num_layers // 2 + 1)
        transfer = asyncio.run(
            disrupt_transfers(
                place / "model.gguf",
                middle,
                place,
                num_kills=kills,
                rate=rate,
                random=Random(seed),
            )
        )
    passed = cutting.passed and transfer.passed and transfer.num_kills == kills
    if as_json:
        click.echo(json.dumps({"cutting": asdict(cutting), "transfer": asdict(transfer), "passed": passed}))
    else:
        _print_transfer(transfer)
        click.echo("passed" if passed else "FAILED")
    sys.exit(0 if passed else 1)


def _print_cutting(report: CuttingReport) -> None:
    click.echo(
        f"model: {report.file_bytes / 1e9:.1f} GB, {report.num_layers} layers, "
        f"{report.data_bytes / 1e6:.0f} MB of it no hole"
    )
    for what, run in (("cut", report.cut), ("hashed", report.hashed)):
        click.echo(
            f"{what}: {run.seconds:.1f} s, peak RSS {run.peak_rss_bytes / 1e6:.0f} MB "
            f"(limit {MOST_RSS_BYTES / 1e6:.0f}), {report.file_bytes / 1e6 / run.seconds:.0f} MB/s, holes "
            "included"
        )
    click.echo(f"stage has the model's bytes: {report.is_equal}")
    click.echo(
        f"without holes, {report.dense_bytes / 1e9:.1f} GB: cut at "
        f"{report.dense_bytes / 1e6 / report.dense_cut_s:.0f} MB/s, plain copy at "
        f"{report.dense_bytes / 1e6 / report.dense_copy_s:.0f} MB/s, both until they are on the disk"
    )


def _print_transfer(report: TransferReport) -> None:
    click.echo(
        f"transfer of {report.weight_bytes / 1e6:.0f} MB killed {report.num_kills} times: "
        f"{report.sent_bytes / 1e6:.0f} MB sent in all, byte-equal: {report.is_equal}"
    )
    click.echo(
        f"{report.num_noticed} of {report.num_turned} flipped bytes noticed, "
        f"{report.refetched_bytes} bytes sent again for pieces of {report.turned_bytes} bytes, byte-equal: "
        f"{report.is_equal_again}"
    )


if __name__ == "__main__":
    main()
