"""The options that concern one model, of `mesh serve` and of `mesh load`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from mesh.commands.options import LayerCounts
from mesh.commands.speculation import speculation_options
from stages.runtime.kv_types import KV_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

Command = TypeVar("Command", bound="Callable[..., Any]")

_OPTIONS: Final = (
    click.option(
        "--stages",
        metavar="N",
        type=click.IntRange(1),
        help="Cut the model into N stages.  [default: the planner's choice]",
    ),
    click.option(
        "--split", type=LayerCounts(), metavar="A,B,…", help="Layers of each stage, such as 10,10,10."
    ),
    click.option(
        "--ctx-size",
        metavar="N",
        type=click.IntRange(16),
        help="Positions of one session, prompt and answer together.  "
        "[default: the model's own, at most 4096]",
    ),
    click.option(
        "--parallel",
        default=4,
        show_default=True,
        metavar="N",
        type=click.IntRange(1, 64),
        help="Sessions at once.",
    ),
    click.option(
        "--kv-type",
        default="f16",
        show_default=True,
        type=click.Choice(list(KV_TYPES)),
        help="Format of the KV caches; q8_0 takes half as much memory as f16.",
    ),
    click.option(
        "--wire",
        default="f32",
        show_default=True,
        type=click.Choice(["f32", "f16", "q8", "auto"]),
        help="How hidden states travel: exact, in half as many bytes, in about a quarter, or as each link "
        "needs.",
    ),
    click.option(
        "--max-waiting",
        default=64,
        show_default=True,
        metavar="N",
        type=click.IntRange(1),
        help="Requests that may wait for a session; more are turned away with 429.",
    ),
    click.option(
        "--exact", is_flag=True, help="Compute so that a text never depends on what else is computed."
    ),
)
# Their help stands in these groups, of both commands.
SESSION_FLAGS: Final = ("--ctx-size", "--parallel", "--kv-type", "--exact", "--wire")
SPECULATION_FLAGS: Final = (
    *("--speculate", "--draft", "--draft-max", "--draft-min", "--p-min", "--draft-threads"),
    *("--draft-gpu-layers", "--draft-kv-type", "--spec-history", "--spec-width", "--spec-depth"),
    *("--no-spec-cancel", "--replay-file"),
)


def one_model_options(command: Command) -> Command:
    """Add them to a command; they arrive as keywords."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return speculation_options(command)


def check_stage_options(stages: int | None, split: tuple[int, ...] | None) -> None:
    """Refuse options that contradict one another.

    Raises:
        click.UsageError: Naming the one to leave out.
    """
    if stages is not None and split is not None:
        raise click.UsageError("--split says how many stages there are: leave out --stages")
