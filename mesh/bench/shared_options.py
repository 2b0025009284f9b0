"""Options that several benchmarks share, as decorators; what differs is an argument."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)

model_argument = click.argument("model", required=False, type=FILE)
one_way_delay_option = click.option(
    "--delay-ms",
    type=click.FloatRange(0.0),
    default=5.0,
    show_default=True,
    help="One-way delay between any two hosts.",
)
threads_option = click.option(
    "--threads",
    "num_threads",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Threads of each stage.",
)
serve_options_option = click.option(
    "--serve",
    "serve_options",
    default="",
    metavar="OPTIONS",
    help="More options of `mesh serve`, in one argument.",
)
logs_option = click.option("--logs", type=FOLDER, help="Keep the logs of the processes in this folder.")
json_option = click.option("--json", "is_json", is_flag=True, help="Print the report as JSON.")


def seed_option(what: str) -> Decorator:
    """`--seed`, of what it says."""
    return click.option(
        "--seed", type=click.IntRange(0), default=1, show_default=True, help=f"Seed of {what}."
    )


def hang_ups_option(meaning: str) -> Decorator:
    """`--hang-ups`: a share, 0 to 1."""
    return click.option(
        "--hang-ups",
        "hang_up_share",
        type=click.FloatRange(0.0, 1.0),
        default=0.0,
        metavar="SHARE",
        help=meaning,
    )


def output_option(default: str) -> Decorator:
    """`-o`: folder of the report."""
    return click.option(
        "-o", "--output", type=FOLDER, default=Path(default), show_default=True, help="Folder of the report."
    )


def report_on_sigterm() -> None:
    """Handle SIGTERM like Ctrl-C: a run with a time limit still reports what it has measured."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
