"""Options that several benchmarks share.

A command names as parameters the options that it works with. All others arrive in its `given`, and are fields
of its options object as they are.
"""

from __future__ import annotations

import shlex
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import click

from mesh.cli.shared_options import ParsedText, float_option, int_option
from meshbench.lab.link import LinkConditions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mesh.cli.shared_options import Command, Decorator
    from meshbench.http_client import Server
    from meshbench.serving_metrics import Slo

FILE: Final = click.Path(path_type=Path, exists=True, dir_okay=False)
FOLDER: Final = click.Path(path_type=Path, file_okay=False)
model_argument: Final = click.argument("model", required=False, type=FILE)
delay_option: Final = float_option("--delay-ms", default=5.0, help="One-way delay between any two hosts.")
threads_option: Final = int_option("--threads", "num_threads", default=1, help="Threads of each stage.")
against_option: Final = click.option(
    "--against",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="CHECKOUT",
    help="Also measure the mesh of another checkout, made with `make environment`, in turn with this one on "
    "the same hosts: ratios with their 95 % interval.",
)
json_option: Final = click.option("--json", "is_json", is_flag=True, help="Print the report as JSON.")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What every run that loads a mesh is told."""

    hang_up_share: float
    """Share of requests whose client disconnects, 0 to 1."""
    is_short: bool
    """Whether it is a quick run: short answers, and little time between events."""
    seed: int
    """Of everything that is random."""
    output: Path
    """Folder for the report."""


@dataclass(frozen=True, kw_only=True)
class LabOptions(RunOptions):
    """What every run that loads a mesh on lab hosts is told; see `RunOptions` for the other options."""

    model: Path
    """A GGUF."""
    num_stages: int
    """Hosts with layers; one more is the head."""
    delay_ms: float
    """One-way delay between any two hosts."""
    jitter_ms: float = 0.0
    """Longest further delay of a packet."""
    loss: float = 0.0
    """Share of packets that are lost, 0 to 1."""
    mbit_per_s: float | None = None
    """Bandwidth of each link in each direction; None for no limit."""
    is_pinned: bool = False
    """Whether each host has processors of its own, or shares one with few."""
    exact: bool
    """Numeric mode; then every text must be the one that was given undisturbed."""
    ctx_size: int
    """Positions of a session."""
    num_threads: int
    """Of each stage."""
    speculate: str
    """Allowed proposers, as in `mesh serve`."""
    serve_options: tuple[str, ...]
    """Further options of `mesh serve`."""
    logs: Path | None
    """Folder for what the processes write; None throws it away."""
    against: Path | None = None
    """Another checkout, whose mesh is measured in turn with this one; None without."""

    @property
    def link(self) -> LinkConditions:
        """Conditions of all links once the mesh is up."""
        return LinkConditions(self.delay_ms, self.jitter_ms, self.loss, self.mbit_per_s)


class Url(ParsedText["Server"]):
    """`http://HOST:PORT`."""

    name = "url"

    def parse(self, text: str) -> Server:
        """To an address."""
        from meshbench.http_client import parse_url  # noqa: PLC0415 - keeps --help quick

        return parse_url(text)


class Goodput(ParsedText["Slo"]):
    """`ttft:500`."""

    name = "slo"

    def parse(self, text: str) -> Slo:
        """To a limit."""
        from meshbench.serving_metrics import parse_slo  # noqa: PLC0415 - keeps --help quick

        return parse_slo(text)


goodput_option: Final = click.option(
    "--goodput",
    "slos",
    type=Goodput(),
    multiple=True,
    metavar="NAME:MS",
    help="Limit in ms for ttft, tpot or e2el, such as ttft:500; may be given several times.",
)


def _split(_context: click.Context, _parameter: click.Parameter, words: str) -> tuple[str, ...]:
    return tuple(shlex.split(words))


def network_options(command: Command) -> Command:
    """`--delay-ms`, `--jitter-ms`, `--loss`, `--mbit` and `--pin-hosts`."""
    options = (
        delay_option,
        float_option("--jitter-ms", default=0.0, help="Longest further delay of a packet, evenly drawn."),
        click.option(
            "--loss",
            type=click.FloatRange(0.0, 1.0, max_open=True),
            default=0.0,
            metavar="SHARE",
            help="Share of packets that are lost, 0 to 1; TCP sends them again.",
        ),
        click.option(
            "--mbit",
            "mbit_per_s",
            type=click.FloatRange(0.0, min_open=True),
            metavar="N",
            help="Bandwidth of each link in each direction, in Mbit/s; no limit unless given.",
        ),
        click.option(
            "--pin-hosts",
            "is_pinned",
            is_flag=True,
            help="Give each host processors of its own, or one that it shares with as few others as can be.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


serve_option: Final = click.option(
    "--serve",
    "serve_options",
    default="",
    metavar="OPTIONS",
    callback=_split,
    help="More options of `mesh serve`, in one argument.",
)


def seed_option(help: str) -> Decorator:
    """`--seed`, 1 unless given."""
    return int_option("--seed", least=0, default=1, help=help)


def hang_ups_option(help: str) -> Decorator:
    """`--hang-ups`, a share from 0 to 1."""
    return click.option(
        "--hang-ups",
        "hang_up_share",
        type=click.FloatRange(0.0, 1.0),
        default=0.0,
        metavar="SHARE",
        help=help,
    )


def output_option(folder: str, help: str = "Folder of the report.") -> Decorator:
    """`--output`, a folder of that name unless given."""
    return click.option("-o", "--output", type=FOLDER, default=Path(folder), show_default=True, help=help)


def logs_option(help: str = "Keep the logs of the processes in this folder.") -> Decorator:
    """`--logs`, a folder."""
    return click.option("--logs", type=FOLDER, help=help)


@contextmanager
def logs_folder(kept: Path | None) -> Iterator[Path]:
    """The folder of `--logs`, made if it is not there; without one, a folder that is removed at the end."""
    with ExitStack() as stack:
        folder = kept or Path(stack.enter_context(TemporaryDirectory(prefix="mesh-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.resolve()
