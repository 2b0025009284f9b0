"""`mesh status`: what a running mesh is doing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from mesh.commands.ask_head import ask_head
from mesh.commands.options import read_first_key


@click.command()
@click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, help="Where the mesh serves its API."
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File whose first key opens the API; or set MESH_API_KEY.",
)
@click.option("--json", "is_json", is_flag=True, help="Print the answer as it came.")
def status(url: str, api_key_file: Path | None, *, is_json: bool) -> None:
    """Show what a running mesh is doing: its hosts, its stages, their times."""
    key = os.environ.get("MESH_API_KEY") if api_key_file is None else read_first_key(api_key_file)
    answer = ask_head(url.rstrip("/") + "/mesh/status", key)
    if is_json:
        click.echo(json.dumps(answer, indent=2))
        return
    from mesh.commands.status_table import print_status  # noqa: PLC0415 - rich is not needed for JSON

    print_status(answer)
