"""`mesh completion`: what a shell needs to complete commands and flags."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

_PROGRAM: Final = "mesh"
# Click's own name for it: the program answers the shell's questions when it is set.
_VARIABLE: Final = "_MESH_COMPLETE"
_SHELLS: Final = ("bash", "zsh", "fish")


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
    click.echo(kind(context.find_root().command, {}, _PROGRAM, _VARIABLE).source())
