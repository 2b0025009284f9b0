"""`mesh unload`: serve a model no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import click

from mesh.commands.ask_head import ask_head
from mesh.commands.head_options import head_options, key_of

if TYPE_CHECKING:
    from pathlib import Path

_WAIT_S: Final = 30.0
_MOST_WAIT_S: Final = 86400.0
# Beyond the wait: to end its stages.
_TIMEOUT_S: Final = 60.0


@click.command()
@click.argument("name")
@head_options
@click.option(
    "--wait",
    "wait_s",
    default=_WAIT_S,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0, _MOST_WAIT_S),
    help="How long requests that run may take to end.",
)
def unload(name: str, url: str, api_key_file: Path | None, wait_s: float) -> None:
    """Serve the model NAME no more, and free what it holds of every host.

    To be run on the head. New requests for it are refused at once. What `mesh serve` was started with stays.
    """
    answer = ask_head(
        f"{url.rstrip('/')}/mesh/unload?model={quote(name, safe='')}&wait_s={wait_s:g}",
        key_of(api_key_file),
        method="POST",
        timeout_s=wait_s + _TIMEOUT_S,
    )
    ended = f" {answer['ended']} requests had to be ended." if answer["ended"] else ""
    click.echo(f"{name} is served no more, and nothing of it is left on the hosts.{ended}")
