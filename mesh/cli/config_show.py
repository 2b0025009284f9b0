"""`mesh config`: where options come from."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from mesh.cli.config_file import find_config, keys_of, nearest, read_config, settings_for
from mesh.cli.main import command_named, configurable_commands
from mesh.util.printable import say

if TYPE_CHECKING:
    from mesh.cli.config_file import ConfigFile, Setting

_DEFAULT: Final = ("serve", "join")
_SECRET: Final = frozenset({"token"})


@click.group()
def config() -> None:
    """Show options and their origin: flag, environment, mesh.toml or default, in this order.

    A file has a table for each command, with the names of its flags: [serve] with port = 9000 and
    wait-for = 2. A variable is named like MESH_SERVE_PORT. The file is the one that --config or MESH_CONFIG
    names, else mesh.toml here, else in ~/.config/spanmesh. Relative paths in it start at its folder. One that
    only lies here may not send an API key to another machine, nor choose one.
    """


@config.command(context_settings={"ignore_unknown_options": True})
@click.option("--origin", is_flag=True, help="Show the origin of each value.")
@click.argument("command", required=False, metavar="[COMMAND]")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS]…")
@click.pass_context
def show(context: click.Context, *, origin: bool, command: str | None, flags: tuple[str, ...]) -> None:
    """Print the effective options of COMMAND as TOML; of serve and join unless one is named.

    FLAGS after it take precedence, as on the command line.
    """
    file = _config_file(context)
    commands = configurable_commands()
    if command is not None and command not in commands:
        raise click.UsageError(f"no command {command!r} has options here{nearest(command, commands)}")
    tables = {} if file is None else read_config(file.path, commands)
    # All of the file is checked, whatever is shown of it.
    everything = {
        name: settings_for(name, command_named(name), tables.get(name, {}), file, os.environ)
        for name in dict.fromkeys((*tables, *([command] if command else _DEFAULT)))
    }
    for name in [command] if command else _DEFAULT:
        say("\n".join([f"[{name}]", *_lines(name, everything[name], flags, with_origin=origin), ""]))


@config.command(name="path")
@click.pass_context
def path_(context: click.Context) -> None:
    """Print the file that is read; exit with 1 if there is none."""
    file = _config_file(context)
    if file is None:
        say("no mesh.toml is read", err=True)
        context.exit(1)
    say(file.path)


def _config_file(context: click.Context) -> ConfigFile | None:
    wanted = context.find_root().params.get("config_path")
    return find_config(wanted, os.environ, Path.cwd())


def _lines(
    name: str, settings: dict[str, Setting], flags: tuple[str, ...], *, with_origin: bool
) -> list[str]:
    command = _asking_for_nothing(command_named(name))
    values = {param: setting.value for param, setting in settings.items()}
    with command.make_context(name, list(flags), default_map=values) as context:
        lines = []
        for key, param in keys_of(command).items():
            assert param.name is not None  # noqa: S101 - click names every parameter
            source = context.get_parameter_source(param.name)
            if source is ParameterSource.COMMANDLINE:
                where = "flag"
            elif source is ParameterSource.DEFAULT_MAP:
                where = settings[param.name].origin
            else:
                where = "default"
            shown = _as_toml(key, param, context.params[param.name])
            lines.append(f"{shown}  # {where}" if with_origin else shown)
    return lines


def _asking_for_nothing(command: click.Command) -> click.Command:
    """The command without required parameters."""
    lenient = copy.copy(command)
    lenient.params = [copy.copy(param) for param in command.params]
    for param in lenient.params:
        param.required = False
    return lenient


def _as_toml(key: str, param: click.Parameter, value: Any) -> str:
    if key in _SECRET and value:
        return f'{key} = "…"'
    if value is None or value in ((), ""):
        return f"# {key} ="
    if isinstance(param, click.Option) and param.is_flag and param.flag_value is False:
        value = not value
    return f"{key} = {json.dumps(_plain(value), ensure_ascii=False)}"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, (bool, int, float)) else str(value)
