"""Other streams beside pictures: how long their tokens take while a large picture is read.

    python -m tests.qualification.pictures.latency

A mesh on this machine, head, stages and encoder together, and a projector in the sizes of a real one. Streams
decode all the time. In each round a picture comes, another one each time, and then as long none: the 99th
percentile of the times between tokens of all streams, by the percentile without.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Final

import click
import structlog

from mesh.cli.own_mesh import own_mesh
from mesh.cli.shared_options import int_option
from mesh.serve.options import demo_model
from meshbench.experiment import experiment
from meshbench.load_client.client import LoadClient
from meshbench.load_client.schedule import Request, Schedule
from meshbench.report_tools import Line, PairedRatio, Report, table_section
from meshbench.shared_options import json_option, logs_folder, logs_option, serve_option
from spanmesh_proto.errors import MeshError
from stages.process_limits import num_usable, processor_name
from tests.qualification.bounded_report import bounded_report
from tests.qualification.pictures.real_sizes import SIDE, asked, write_real_sizes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from meshbench.load_client.answers import AnswerRecord

_STREAM_TOKENS: Final = 400
_SETTLE_S: Final = 1.0
_END_S: Final = 120.0
_FEWEST_GAPS: Final = 100
_MOST_RATIO: Final = 2.0

log = structlog.get_logger()


@dataclass(frozen=True)
class Round:
    """Times between tokens of all streams, in milliseconds."""

    encoding_ms: tuple[float, ...]
    """While a picture is decoded and encoded."""
    prefill_ms: tuple[float, ...]
    """While its rows are computed, until its first token."""
    alone_ms: tuple[float, ...]
    """While none is there."""
    first_token_ms: float
    """Of the picture."""

    @property
    def beside_ms(self) -> tuple[float, ...]:
        """From the request with the picture to its first token."""
        return self.encoding_ms + self.prefill_ms

    @property
    def pair(self) -> tuple[float, float]:
        """99th percentiles: beside the picture, and alone."""
        return p99(self.beside_ms), p99(self.alone_ms)


@dataclass(frozen=True)
class _Times:
    """Of a round, by `time.perf_counter`."""

    sent_s: float
    encoded_s: float
    first_s: float
    alone_s: float
    """Begin of the time without a picture, which is as long as that with one."""

    def round_of(self, streams: Iterable[AnswerRecord]) -> Round:
        """Gaps of the streams; those that begin in a time belong to it."""
        gaps = [
            (start, 1e3 * (stop - start)) for one in streams for start, stop in pairwise(one.record.parts_s)
        ]

        def between(start_s: float, stop_s: float) -> tuple[float, ...]:
            return tuple(gap_ms for at_s, gap_ms in gaps if start_s <= at_s < stop_s)

        length_s = self.first_s - self.sent_s
        return Round(
            between(self.sent_s, self.encoded_s),
            between(self.encoded_s, self.first_s),
            between(self.alone_s, self.alone_s + length_s),
            1e3 * length_s,
        )


def p99(gaps_ms: Sequence[float]) -> float:
    """Their 99th percentile.

    Raises:
        MeshError: If they are too few for one.
    """
    if len(gaps_ms) < _FEWEST_GAPS:
        raise MeshError(f"only {len(gaps_ms)} tokens came in a round: take more streams")
    return quantiles(gaps_ms, n=100)[-1]


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
        *("--ctx-size", "1024", "--parallel", str(num_streams + 1), *options),
    ]
    with (
        (folder / "mesh.log").open("w+b") as mesh_log,
        own_mesh(arguments, mesh_log) as mesh,
        LoadClient(None) as client,
    ):
        # Nothing measured is a first time.
        _ask(client, mesh.url, 0)
        chats = tuple((_stream(number),) for number in range(num_streams))
        streams = client.start(Schedule(mesh.url, chats, num_streams))
        time.sleep(2 * _SETTLE_S)
        found = [_round(client, mesh.url, 1 + number) for number in range(num_rounds)]
        answers = streams.end(timeout_s=_END_S).complete("the mesh").answers
    return [times.round_of(answers) for times in found]


def _stream(number: int) -> Request:
    content = f"Tell me a long story about number {number}."
    fields = {"max_tokens": _STREAM_TOKENS, "temperature": 0, "ignore_eos": True}
    return Request.streamed({"messages": [{"role": "user", "content": content}], **fields})


def _ask(client: LoadClient, url: str, seed: int) -> AnswerRecord:
    (answer,) = client.answer(url, (Request.streamed(asked(seed, 1)),)).answers
    return answer


def _round(client: LoadClient, url: str, seed: int) -> _Times:
    answer = _ask(client, url, seed)
    sent_s, first_s = answer.record.sent_s, answer.record.parts_s[0]
    # Its rows are computed behind the longest silence: bytes come with each window of the prompt.
    told_s = [sent_s, *(at_s for at_s in answer.bytes_s if at_s < first_s), first_s]
    _, encoded_s = max(pairwise(told_s), key=lambda pair: pair[1] - pair[0])
    time.sleep(_SETTLE_S)
    alone_s = time.perf_counter()
    time.sleep(first_s - sent_s + _SETTLE_S)
    log.info("round_done", picture=seed, first_token_s=round(first_s - sent_s, 2))
    return _Times(sent_s, encoded_s, first_s, alone_s)


def lines(rounds: Sequence[Round]) -> list[Line]:
    """The figures with their bounds."""
    pairs = [each.pair for each in rounds]
    ratio = PairedRatio.of(pairs)
    ratios = sorted(beside / alone for beside, alone in pairs)
    note = f"95 % interval {ratio.low:.2f} to {ratio.high:.2f} of {len(rounds)} rounds"
    alone = [gap for each in rounds for gap in each.alone_ms]
    parts = {
        "a picture is encoded": [gap for each in rounds for gap in each.encoding_ms],
        "its rows are computed": [gap for each in rounds for gap in each.prefill_ms],
    }
    return [
        Line(
            "p99 between tokens of others beside a picture, over without",
            ratio.ratio,
            _MOST_RATIO,
            is_ceiling=True,
            note=f"{note}, which are {ratios[0]:.2f} to {ratios[-1]:.2f}, median {median(ratios):.2f}",
        ),
        *(
            Line(
                f"the same while {what}, all rounds together",
                p99(gaps) / p99(alone),
                None,
                note=f"{p99(gaps):.1f} and {p99(alone):.1f} ms, medians {median(gaps):.1f} and "
                f"{median(alone):.1f}, {len(gaps)} tokens",
            )
            for what, gaps in parts.items()
        ),
        Line(
            "first token of a picture beside them, s",
            median(each.first_token_ms for each in rounds) / 1e3,
            None,
        ),
    ]


def report(rounds: Sequence[Round], num_streams: int, options: Sequence[str]) -> Report:
    """The rounds, and the figures with their bounds."""
    conditions: dict[str, Any] = {
        "picture": f"{SIDE} × {SIDE} pixels",
        "streams beside it": num_streams,
        "options": " ".join(options),
        "cores": num_usable(),
        "processor": processor_name(),
    }
    rows = [
        (
            str(number),
            *(f"{gap_ms:.1f}" for gap_ms in each.pair),
            f"{len(each.beside_ms)}, {len(each.alone_ms)}",
            f"{each.first_token_ms / 1e3:.2f}",
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
