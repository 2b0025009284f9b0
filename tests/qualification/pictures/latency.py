"""Other streams beside pictures: how long their tokens take while a large picture is read.

    python -m tests.qualification.pictures.latency

A mesh on this machine, head, encoder and the two stages of the demo together, and a projector in the sizes of
a real one; another layout by `--serve "--stages 1"`. Streams decode all the time. In each round a picture
comes, another one each time, and then as long none: the 99th percentile of the times between tokens of all
streams, by the percentile without.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import click
import structlog

from mesh.cli.own_mesh import own_mesh
from mesh.cli.shared_options import int_option
from mesh.serve.options import demo_model
from meshbench.experiment import experiment
from meshbench.load_client.client import LoadClient
from meshbench.load_client.schedule import Request
from meshbench.report_tools import Line, Report, table_section
from meshbench.shared_options import json_option, logs_folder, logs_option, serve_option
from stages.process_limits import num_usable, processor_name
from tests.qualification.bounded_report import bounded_report
from tests.qualification.pictures.real_sizes import SIDE, asked, write_real_sizes
from tests.qualification.pictures.streams import Streams, p99, ratio_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from meshbench.load_client.answers import AnswerRecord

_SETTLE_S: Final = 1.0
_MOST_RATIO: Final = 2.0

log = structlog.get_logger()


@dataclass(frozen=True)
class Round:
    """Times between tokens of all streams, in milliseconds."""

    beside_ms: tuple[float, ...]
    """From the request with the picture to its first token."""
    alone_ms: tuple[float, ...]
    """As long without one."""
    first_token_s: float
    """Of the picture."""

    @property
    def pair(self) -> tuple[float, float]:
        """99th percentiles: beside the picture, and alone."""
        return p99(self.beside_ms), p99(self.alone_ms)


def measure(folder: Path, num_rounds: int, num_streams: int, options: Sequence[str]) -> list[Round]:
    """Serve a model with the projector, and take all rounds.

    Args:
        folder: For files and logs.
        num_rounds: Pictures.
        num_streams: Other answers at once.
        options: Further ones of `mesh serve`.

    Raises:
        MeshError: If the mesh does not come up, or a request fails.
    """
    files = write_real_sizes(demo_model(), folder)
    arguments = [
        *(str(files.model), "--mmproj", str(files.projector), "--speculate", "off"),
        *("--stages", "2", "--ctx-size", "1024", "--parallel", str(num_streams + 1), *options),
    ]
    streams = Streams(num_streams)
    with (
        (folder / "mesh.log").open("w+b") as mesh_log,
        own_mesh(arguments, mesh_log) as mesh,
        LoadClient(None) as client,
    ):
        # Nothing measured is a first time.
        _show(client, mesh.url, 0)
        with streams.running(client, mesh.url):
            time.sleep(2 * _SETTLE_S)
            times = [_times(client, mesh.url, 1 + number) for number in range(num_rounds)]
    return [
        Round(
            streams.between(sent_s, first_s),
            streams.between(alone_s, alone_s + first_s - sent_s),
            first_s - sent_s,
        )
        for sent_s, first_s, alone_s in times
    ]


def _show(client: LoadClient, url: str, seed: int) -> AnswerRecord:
    (answer,) = client.answer(url, (Request.streamed(asked(seed, 1)),)).answers
    return answer


def _times(client: LoadClient, url: str, seed: int) -> tuple[float, float, float]:
    """When a picture is sent, when its first token comes, and when a time without one begins, as long."""
    record = _show(client, url, seed).record
    sent_s, first_s = record.sent_s, record.parts_s[0]
    time.sleep(_SETTLE_S)
    alone_s = time.perf_counter()
    time.sleep(first_s - sent_s + _SETTLE_S)
    log.info("round_done", picture=seed, first_token_s=round(first_s - sent_s, 2))
    return sent_s, first_s, alone_s


def lines(rounds: Sequence[Round]) -> list[Line]:
    """The figures with their bounds."""
    beside = [gap_ms for each in rounds for gap_ms in each.beside_ms]
    alone = [gap_ms for each in rounds for gap_ms in each.alone_ms]
    return [
        ratio_line(
            "p99 between tokens of others beside a picture, over without",
            [each.pair for each in rounds],
            _MOST_RATIO,
        ),
        Line(
            "median likewise, all rounds together",
            median(beside) / median(alone),
            None,
            note=f"{median(beside):.1f} and {median(alone):.1f} ms",
        ),
        Line("first token of a picture beside them, s", median(each.first_token_s for each in rounds), None),
    ]


def report(rounds: Sequence[Round], num_streams: int, options: Sequence[str]) -> Report:
    """The rounds, and the figures with their bounds."""
    conditions: dict[str, Any] = {
        "picture": f"{SIDE} × {SIDE} pixels",
        "streams beside it": num_streams,
        "options": " ".join(("--stages 2", *options)),
        "cores": num_usable(),
        "processor": processor_name(),
    }
    rows = [
        (
            str(number),
            *(f"{gap_ms:.1f}" for gap_ms in each.pair),
            f"{len(each.beside_ms)}, {len(each.alone_ms)}",
            f"{each.first_token_s:.2f}",
        )
        for number, each in enumerate(rounds, 1)
    ]
    heads = ("round", "p99 beside, ms", "p99 without, ms", "tokens", "first token of the picture, s")
    return bounded_report(
        "Streams beside pictures", conditions, lines(rounds), table_section("## Rounds", heads, rows)
    )


@click.command()
@int_option("--rounds", "num_rounds", default=12, metavar="N", help="Pictures.")
@int_option("--streams", "num_streams", default=3, metavar="N", help="Answers beside them.")
@serve_option
@logs_option()
@json_option
@experiment
def main(*, num_rounds: int, num_streams: int, serve_options: tuple[str, ...], logs: Path | None) -> Report:
    """Measure the times between tokens of other streams beside pictures, on a mesh of this machine.

    Prints them with their bounds, and exits with 1 if one is missed.
    """
    with logs_folder(logs) as folder:
        return report(measure(folder, num_rounds, num_streams, serve_options), num_streams, serve_options)


if __name__ == "__main__":
    main()
