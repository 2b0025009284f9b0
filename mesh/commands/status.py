"""`mesh status`: what a running mesh is doing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from mesh.commands.ask_head import ask_head
from mesh.commands.head_options import head_options, key_of

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@head_options
@click.option("--json", "is_json", is_flag=True, help="Print the answer as it came.")
def status(url: str, api_key_file: Path | None, *, is_json: bool) -> None:
    """Show what a running mesh is doing: its hosts, its stages, their times."""
    answer = ask_head(url.rstrip("/") + "/mesh/status", key_of(api_key_file))
    if is_json:
        click.echo(json.dumps(answer, indent=2))
        return
    from mesh.commands.status_table import print_status  # noqa: PLC0415 - rich is not needed for JSON

    print_status(answer)
