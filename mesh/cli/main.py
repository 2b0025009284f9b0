"""Command `mesh`: its subcommands, configuration and `mesh config`, exit codes and shell completion."""

from __future__ import annotations

import copy
import importlib
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource
from click.shell_completion import get_completion_class

from mesh.cli.config_file import find_config, keys_of, nearest, read_config, settings_for
from mesh.util.child_environment import protect_children
from mesh.util.printable import say
from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.cli.config_file import ConfigFile, Setting

EXIT_ERROR: Final = 1
EXIT_INTERRUPTED: Final = 130
# Module of each command, and its line in `mesh --help`, which imports none of them.
_COMMANDS: Final = {
    "serve": ("mesh.cli.serve:serve", "Serve a model on one or several hosts."),
    "join": ("mesh.cli.hosts:join", "Join a mesh with this host."),
    "plan": ("mesh.cli.plan:plan", "Show where a model's layers would be placed, and the expected speed."),
    "top": ("mesh.cli.top:top", "Watch a running mesh: stages, links, speculation, sessions."),
    "chat": ("mesh.cli.chat:chat", "Chat with a running mesh in this terminal."),
    "agent": ("mesh.cli.agent:agent", "Start a coding agent that uses a running mesh."),
    "doctor": ("mesh.cli.doctor:doctor", "Check this host or a running mesh, and show remedies."),
    "config": ("mesh.cli.main:config", "Show options and their origin."),
    "completion": (
        "mesh.cli.main:completion",
        "Print the completion script of a shell.",
    ),
    "status": ("mesh.cli.status:status", "Show what a running mesh is doing."),
    "keys": ("mesh.cli.keys:keys", "Manage the API keys."),
    "load": ("mesh.cli.load:load", "Load one more model into a running mesh."),
    "unload": ("mesh.cli.load:unload", "Unload a model and free its memory."),
    "drain": ("mesh.cli.hosts:drain", "Move a host's layers to others, then let it leave."),
    "evict": ("mesh.cli.hosts:evict", "Disconnect a host at once and replace the join token."),
    "slice": ("mesh.cli.certify:slice_", "Write layers of a model to a stage file."),
    "models": ("mesh.cli.models:models", "List and remove the weights stored on this host."),
    "draft": ("mesh.cli.draft:draft", "Make, check or tune a drafter for speculation."),
    "bench": ("meshbench.cli:bench", "Measure a server, or a lab of several hosts on this machine."),
    "certify": ("mesh.cli.certify:certify", "Compare a model cut into stages with the whole model."),
}
# Sections of `mesh --help`; other commands come last.
_SECTIONS: Final = {
    "Serve": ("serve", "join", "load", "unload", "plan", "chat", "agent"),
    "Look": ("status", "top", "doctor", "bench"),
    "Hosts and keys": ("drain", "evict", "keys"),
    "Models": ("certify", "slice", "draft", "models"),
    "This program": ("config", "completion"),
}
# Groups of commands: a file does not set their options.
_GROUPS: Final = frozenset({"keys", "draft", "models", "bench", "config"})
_PROGRAM: Final = "mesh"
# Click's own name for it: the program answers the shell's questions when it is set.
_VARIABLE: Final = "_MESH_COMPLETE"
_SHELLS: Final = ("bash", "zsh", "fish")
_REST: Final = "Others"
_DEFAULT: Final = ("serve", "join")
_SECRET: Final = frozenset({"token"})


class _LazyGroup(click.Group):
    """Imports a command when it is called."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Click would first print an empty line, between the lines of a log in JSON.
            raise click.exceptions.Exit(EXIT_INTERRUPTED) from None

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        return command_named(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        shown = {name for names in _SECTIONS.values() for name in names}
        rest = tuple(name for name in _COMMANDS if name not in shown)
        for title, names in (*_SECTIONS.items(), ("More", rest)):
            if names:
                with formatter.section(title):
                    formatter.write_dl([(name, _COMMANDS[name][1]) for name in names])


class SectionedCommand(click.Command):
    """A command with sections in its help.

    Args:
        sections: Flags by section title, in order; others come last.
    """

    def __init__(self, *arguments: Any, sections: Mapping[str, tuple[str, ...]], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every option once."""
        left = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                left[max(param.opts, key=len)] = record
        for title, flags in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([left.pop(flag) for flag in flags])
        with formatter.section(_REST):
            formatter.write_dl(list(left.values()))


def every_command() -> tuple[str, ...]:
    """All names, in the order of the help."""
    ordered = [name for names in _SECTIONS.values() for name in names]
    return tuple(dict.fromkeys((*ordered, *_COMMANDS)))


def configurable_commands() -> tuple[str, ...]:
    """Commands whose options a file or the environment may set."""
    return tuple(name for name in _COMMANDS if name not in _GROUPS)


def command_named(name: str) -> click.Command:
    """A command, imported at this call."""
    module, _, attribute = _COMMANDS[name][0].partition(":")
    command: click.Command = getattr(importlib.import_module(module), attribute)
    return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(SOFTWARE_VERSION, prog_name="mesh")
@click.option("-v", "--verbose", "is_verbose", is_flag=True, help="Also log debug events.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Options of commands, TOML; see `mesh config --help`.",
)
@click.pass_context
def mesh(context: click.Context, *, is_verbose: bool, config_path: Path | None) -> None:
    """Run one large language model over several ordinary machines."""
    from mesh.util.logs import set_up_logs  # noqa: PLC0415 - `mesh --help` logs nothing

    set_up_logs(is_verbose=is_verbose)
    name = context.invoked_subcommand
    if name in configurable_commands():
        context.default_map = {name: _settings(name, config_path)}


def _settings(name: str, config_path: Path | None) -> dict[str, Any]:
    """Settings of a command's options by the environment and a file."""
    from mesh.cli.config_file import find_config, read_config, settings_for  # noqa: PLC0415

    file = find_config(config_path, os.environ, Path.cwd())
    table = {} if file is None else read_config(file.path, configurable_commands()).get(name, {})
    found = settings_for(name, command_named(name), table, file, os.environ)
    return {param: setting.value for param, setting in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: exit code 0, 1 for an error of ours, 2 for wrong usage, 130 after Ctrl-C."""
    protect_children()
    code = run(arguments)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # The reader of the output is gone. Python would write again at exit, complain, and change the
            # exit code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: Arguments without the program's name; those of this process unless given.
    """
    try:
        outcome: object = mesh.main(arguments, prog_name="mesh", standalone_mode=False)
    except click.exceptions.Exit as finished:
        return finished.exit_code
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        # Values in it may come from a file.
        say(shown.getvalue().removesuffix("\n"), err=True)
        return error.exit_code
    except MeshError as error:
        say(f"error: {error.message}", err=True)
        return EXIT_ERROR
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return outcome if isinstance(outcome, int) else 0


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, *, shell: str) -> None:
    """Print a script that makes SHELL complete commands and flags of `mesh`.

    For bash, to ~/.local/share/bash-completion/completions/mesh. For zsh, to a file called _mesh in a folder
    of $fpath. For fish, to ~/.config/fish/completions/mesh.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click has all three
    say(kind(context.find_root().command, {}, _PROGRAM, _VARIABLE).source())


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
