"""`mesh evict`: cut a host off."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from mesh.commands.ask_head import ask_head
from mesh.commands.head_options import head_options, key_of

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@click.argument("name")
@head_options
def evict(name: str, url: str, api_key_file: Path | None) -> None:
    """Cut host NAME off at once; what it holds is repaired as if it had failed.

    To be run on the head. The host is not let in again, and the join token is replaced: `mesh serve` prints
    the new `mesh join` line. Hosts that are in stay in.
    """
    ask_head(f"{url.rstrip('/')}/mesh/evict?host={quote(name)}", key_of(api_key_file), method="POST")
    click.echo(f"{name} is out. The old join token admits nobody any more; `mesh serve` printed a new one.")
