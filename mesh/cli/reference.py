"""Writer of the tables of commands and flags in README.md.

Between the markers `<!-- commands -->`, `<!-- flags of NAME: --a, --b -->` or `<!-- settings of NAME -->` and
`<!-- end -->` everything is written anew. With --check nothing is written, and the exit code says whether it
would have been.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import click

from mesh.cli.config_file import key_of
from mesh.cli.main import command_named, every_command
from mesh.cli.options import OptionsCommand
from spanmesh_proto.errors import ClusterError

_PROGRAM: Final = "mesh"
_BLOCK: Final = re.compile(
    r"(<!-- (?P<what>commands|flags of [\w ]+: [^>]+?|settings of [\w ]+?) -->\n\n).*?(\n\n<!-- end -->)",
    re.DOTALL,
)
_TOLD_DEFAULT: Final = re.compile(r"\s*\[default: ([^\]]+)\]")
_LINE_CHARS: Final = 300


def leaf_commands() -> dict[str, click.Command]:
    """Every command that does something, by its words after `mesh`."""
    found: dict[str, click.Command] = {}
    for name in every_command():
        command = command_named(name)
        if isinstance(command, click.Group):
            context = click.Context(command, info_name=name)
            for inner in command.list_commands(context):
                nested = command.get_command(context, inner)
                if nested is not None:
                    found[f"{name} {inner}"] = nested
        else:
            found[name] = command
    return found


def commands_table() -> str:
    """Usage and first line of every command."""
    rows = [
        f"| `{_usage(name, command)}` | {_cell(command.get_short_help_str(_LINE_CHARS))} |"
        for name, command in leaf_commands().items()
    ]
    return "\n".join(["| | |", "|---|---|", *rows])


def flags_table(name: str, flags: list[str]) -> str:
    """Meanings and defaults of some flags of a command.

    Raises:
        ClusterError: If the command has no such flag.
    """
    command = leaf_commands()[name]
    options = {
        opt: param
        for param in command.params
        if isinstance(param, click.Option)
        for opt in (*param.opts, *param.secondary_opts)
    }
    rows = []
    for flag in flags:
        if flag not in options:
            raise ClusterError(f"mesh {name} has no {flag}")
        meaning, default = _meaning(options[flag])
        rows.append(f"| `{flag}` | {_cell(meaning)} | {default} |")
    return "\n".join(["| option | meaning | unless given |", "|---|---|---|", *rows])


def settings_table(name: str) -> str:
    """Meanings of the rare options of a command, which are given as `--set KEY=VALUE`."""
    command = leaf_commands()[name]
    rows = []
    for option in command.rare if isinstance(command, OptionsCommand) else ():
        meaning, default = _meaning(option)
        rows.append(f"| `{key_of(option)}` | {_cell(meaning)} | {default} |")
    return "\n".join(["| key | meaning | unless given |", "|---|---|---|", *rows])


def rewritten(text: str) -> str:
    """The document with its tables as they should be."""

    def table(block: re.Match[str]) -> str:
        what = block["what"]
        if what == "commands":
            made = commands_table()
        elif what.startswith("settings of "):
            made = settings_table(what.removeprefix("settings of "))
        else:
            name, _, flags = what.removeprefix("flags of ").partition(": ")
            made = flags_table(name, flags.split(", "))
        return f"{block[1]}{made}{block[3]}"

    return _BLOCK.sub(table, text)


def _usage(name: str, command: click.Command) -> str:
    parts = [_PROGRAM, name]
    context = click.Context(command)
    for param in command.params:
        if isinstance(param, click.Argument):
            parts.append(param.make_metavar(context).replace("|", ","))
        elif isinstance(param, click.Option) and param.required:
            parts += [min(param.opts, key=len), param.make_metavar(context)]
    return " ".join(parts)


def _meaning(option: click.Option) -> tuple[str, str]:
    text = option.help or ""
    told = _TOLD_DEFAULT.search(text)
    meaning = _TOLD_DEFAULT.sub("", text).strip()
    if told is not None:
        return meaning, told[1]
    if option.is_flag or not option.show_default or option.default is None:
        return meaning, ""
    return meaning, f"`{option.default}`" if isinstance(option.default, str) else f"{option.default:g}"


def _cell(text: str) -> str:
    return text.replace("|", "/")


@click.command()
@click.argument("document", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--check", "is_check", is_flag=True, help="Write nothing; exit with 1 if it would change.")
def main(document: Path, *, is_check: bool) -> None:
    """Write the tables of DOCUMENT."""
    before = document.read_text(encoding="utf-8")
    after = rewritten(before)
    if is_check:
        click.get_current_context().exit(int(after != before))
    document.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
