"""The command line that a report was made with, to be shown in it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


def command_line(context: click.Context, *, without: Collection[str] = ()) -> str:
    """What to type for the same run: all that is not left to its default, wherever it was said.

    Files are called by their names alone: folders are another machine's.

    Args:
        context: Of the command that runs.
        without: Names of parameters that change nothing in what is measured.
    """
    command = context.command
    words: list[str] = []
    for param in sorted(command.params, key=lambda param: isinstance(param, click.Option)):
        source = context.get_parameter_source(param.name or "")
        if param.name in without or source in {ParameterSource.DEFAULT, None}:
            continue
        words += _words(param, context.params[param.name or ""])
    return shlex.join([*context.command_path.split(), *words])


def _words(param: click.Parameter, value: Any) -> Iterator[str]:
    if not isinstance(param, click.Option):
        yield _text(value)
    elif param.is_flag:
        yield param.secondary_opts[0] if param.secondary_opts and not value else param.opts[0]
    else:
        yield param.opts[-1]
        yield _text(value)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(_text(each) for each in value)
    if isinstance(value, float):
        return f"{value:g}"
    return value.name if isinstance(value, Path) else str(value)
