"""What the environment and a file say of one command's options."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from mesh.config.keys import first_unknown, from_toml, from_variable, keys_of, nearest, prefix_of, variable_of
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """One option's value.

    Attributes:
        value: As click takes it.
        origin: `environment NAME` or `file PATH`.
    """

    value: Any
    origin: str


def read_config(path: Path, commands: Collection[str]) -> dict[str, dict[str, Any]]:
    """The tables of a file, one for each command.

    Args:
        path: The file.
        commands: Names that tables may have.

    Raises:
        ClusterError: If it cannot be read, or has a table that no command is called for.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} cannot be read: {error}", param="--config") from error
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{path} is not TOML: {error}", param="--config") from error
    unknown = first_unknown(tables, commands)
    if unknown is not None:
        raise ClusterError(
            f"{path}: no command [{unknown}] has options here{nearest(unknown, commands)}", param="--config"
        )
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ClusterError(f"{path}: {name} is to be a table, [{name}]", param="--config")
    return tables


def settings_for(
    name: str,
    command: click.Command,
    table: Mapping[str, Any],
    path: Path | None,
    environment: Mapping[str, str],
) -> dict[str, Setting]:
    """By the parameter's name: what the environment says, else what the file says.

    Args:
        name: Of the command.
        command: The command.
        table: The file's, for this command.
        path: Of the file.
        environment: Of this process.

    Raises:
        ClusterError: If a key or a variable is unknown, or a value is none of its option's.
    """
    keys = keys_of(command)
    unknown = first_unknown(table, keys)
    if unknown is not None:
        raise ClusterError(f"{path}: [{name}] has no {unknown!r}{nearest(unknown, keys)}", param="--config")
    variables = {variable_of(name, key): key for key in keys}
    stray = next(
        (each for each in environment if each.startswith(prefix_of(name)) and each not in variables), None
    )
    if stray is not None:
        raise ClusterError(
            f"the environment has {stray}, which `mesh {name}` does not know{nearest(stray, variables)}"
        )
    found: dict[str, Setting] = {}
    for key, param in keys.items():
        variable = variable_of(name, key)
        setting = None
        if environment.get(variable):
            setting = _setting(param, environment[variable], None, f"environment {variable}", key)
        elif key in table:
            setting = _setting(param, table[key], path, f"file {path}", key)
        if setting is not None and param.name is not None:
            found[param.name] = setting
    return found


def _setting(param: click.Parameter, value: Any, path: Path | None, origin: str, key: str) -> Setting:
    """Checked now, so that what is wrong is said of the place where it stands."""
    try:
        taken = from_variable(param, value) if path is None else from_toml(param, value, path.parent)
        with click.Context(click.Command(None)) as context:
            param.type_cast_value(context, taken)
    except (ValueError, click.BadParameter) as error:
        reason = error.message if isinstance(error, click.BadParameter) else str(error)
        raise ClusterError(f"{key} by {origin}: {reason}", param="--config") from None
    return Setting(taken, origin)
