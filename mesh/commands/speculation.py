"""The options of `mesh serve` that speak of speculation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from stages.runtime.kv_types import KV_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.serve.options import SpeculationOptions

Command = TypeVar("Command", bound="Callable[..., Any]")

_FILE: Final = click.Path(path_type=Path, dir_okay=False)

_OPTIONS: Final = (
    click.option(
        "--speculate",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "off", "ngram", "draft", "replay"]),
        help="Who proposes tokens that the model then verifies; auto asks all there are, as far as it pays.",
    ),
    click.option(
        "--draft", "draft_path", type=_FILE, metavar="PATH", help="A small GGUF model that drafts for MODEL."
    ),
    click.option(
        "--draft-max",
        default=8,
        show_default=True,
        metavar="N",
        type=click.IntRange(1),
        help="Tokens that it drafts ahead.",
    ),
    click.option(
        "--draft-min",
        default=1,
        show_default=True,
        metavar="N",
        type=click.IntRange(1),
        help="Fewer are not worth offering.",
    ),
    click.option(
        "--p-min",
        default=0.0,
        show_default=True,
        metavar="P",
        type=click.FloatRange(0.0, 1.0),
        help="A draft stops at a token that it thinks less likely than this.",
    ),
    click.option(
        "--draft-threads",
        default=1,
        show_default=True,
        metavar="N",
        type=click.IntRange(1),
        help="Threads of the draft model.",
    ),
    click.option(
        "--draft-gpu-layers",
        default=-1,
        show_default=True,
        metavar="N",
        type=click.IntRange(-1),
        help="Layers of the draft model on the GPU, -1 for all.",
    ),
    click.option(
        "--draft-kv-type",
        default="f16",
        show_default=True,
        type=click.Choice(list(KV_TYPES)),
        help="Format of its KV cache.",
    ),
    click.option(
        "--spec-history",
        "keeps_history",
        is_flag=True,
        help="Propose from earlier answers to the same API key, too.",
    ),
    click.option(
        "--spec-width",
        "width",
        metavar="N",
        type=click.IntRange(0),
        help="Always propose N tokens at a time.",
    ),
    click.option(
        "--spec-depth", "depth", metavar="N", type=click.IntRange(1), help="Always keep N windows in flight."
    ),
    click.option(
        "--no-spec-cancel",
        "cancels",
        is_flag=True,
        flag_value=False,
        default=True,
        help="Do not tell hosts at once which windows a rejection voided.",
    ),
    click.option(
        "--replay-file",
        "replay_path",
        type=_FILE,
        metavar="PATH",
        help="For benchmarks: recorded answers, which --speculate replay proposes.",
    ),
)


def speculation_options(command: Command) -> Command:
    """Add them to a command; they arrive as keywords."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def speculation_from(speculate: str, **values: Any) -> SpeculationOptions:
    """What the user said.

    Raises:
        ClusterError: If options contradict one another.
    """
    from mesh.serve.options import SpeculationOptions  # noqa: PLC0415 - keeps --help quick

    return SpeculationOptions(mode=speculate, **values)  # type: ignore[arg-type]  # click has checked it
