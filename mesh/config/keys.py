"""What an option of a command is called in a file and in the environment, and what it may be there. Pure."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
# Of the models that are no files.
_REMOTE: Final = "hf:"


def key_of(param: click.Parameter) -> str:
    """`wait-for` for `--wait-for`, `model` for MODEL: the flag without its dashes."""
    longest = max(param.opts, key=len)
    return longest.lstrip("-").replace("_", "-").lower()


def keys_of(command: click.Command) -> dict[str, click.Parameter]:
    """By key, all that a command takes but `--help`."""
    return {
        key_of(param): param
        for param in command.params
        if not (isinstance(param, click.Option) and param.is_eager and not param.expose_value)
    }


def variable_of(command: str, key: str) -> str:
    """`MESH_SERVE_WAIT_FOR` for `wait-for` of `serve`."""
    return f"{prefix_of(command)}{key.upper().replace('-', '_')}"


def prefix_of(command: str) -> str:
    """With what the variables of a command begin."""
    return f"MESH_{command.upper().replace('-', '_')}_"


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean port?`, or what there is if nothing is near."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(names)}"


def from_toml(param: click.Parameter, value: Any, folder: Path) -> Any:
    """A value as click takes it for the parameter.

    Args:
        param: The parameter.
        value: As TOML has it.
        folder: Of the file; relative paths start there.

    Raises:
        ValueError: If it is of the wrong kind; one phrase.
    """
    if _is_flag(param):
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither true nor false")
        return _flag(param, is_on=value)
    if _takes_many(param):
        values = value if isinstance(value, list) else [value]
        return [_scalar(param, each, folder) for each in values]
    if isinstance(value, list):
        return ",".join(str(_scalar(param, each, folder)) for each in value)
    return _scalar(param, value, folder)


def from_variable(param: click.Parameter, text: str) -> Any:
    """A variable's text as click takes it for the parameter; several values stand between commas.

    Raises:
        ValueError: If it is of the wrong kind; one phrase.
    """
    if _is_flag(param):
        word = text.strip().lower()
        if word not in _TRUE | _FALSE:
            raise ValueError(f"{text!r} is neither true nor false")
        return _flag(param, is_on=word in _TRUE)
    if _takes_many(param):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _scalar(param: click.Parameter, value: Any, folder: Path) -> Any:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r} is not a text or a number")  # noqa: TRY004 - of the user's, not of code
    if isinstance(param.type, click.Path):
        return _path(str(value), folder)
    return value


def _path(text: str, folder: Path) -> str:
    if text == "-" or text.startswith(_REMOTE):
        return text
    return str(folder / Path(text).expanduser())


def _is_flag(param: click.Parameter) -> bool:
    return isinstance(param, click.Option) and param.is_flag


def _takes_many(param: click.Parameter) -> bool:
    return isinstance(param, click.Option) and param.multiple


def _flag(param: click.Parameter, *, is_on: bool) -> bool:
    """What the flag stands for: some switch off what is on otherwise."""
    negative = isinstance(param, click.Option) and param.flag_value is False and not param.secondary_opts
    return is_on != negative


def first_unknown(table: Mapping[str, Any], known: Iterable[str]) -> str | None:
    """The first key of a table that nobody knows."""
    names = set(known)
    return next((key for key in table if key not in names), None)
