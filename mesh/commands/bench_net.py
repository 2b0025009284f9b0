"""`mesh bench net`: the links between the hosts of a running mesh."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from mesh.cli.head_client import ask_head
from mesh.cli.shared_options import head_options, key_of

if TYPE_CHECKING:
    from pathlib import Path

_MB = 10**6
_TIMEOUT_S = 600.0


@click.command()
@head_options
@click.option(
    "--probes",
    type=click.IntRange(1, 1000),
    default=50,
    show_default=True,
    help="Round trips of each size on each link; more than 50 on the head only.",
)
@click.option(
    "--megabytes",
    type=click.IntRange(0, 200),
    default=8,
    show_default=True,
    metavar="MB",
    help="Sent over each link, twice, to find its bandwidth, on the head only; 0 leaves that out.",
)
@click.option("--json", "is_json", is_flag=True, help="Print the figures as JSON.")
def net(url: str, api_key_file: Path | None, probes: int, megabytes: int, *, is_json: bool) -> None:
    """Measure the links between the hosts of a running mesh, over the streams that windows take.

    Every host measures its links to every other, hosts without a stage too: round trips of 64 bytes and of
    one row of hidden states, and bandwidth. Then it says what a token's round takes on the wire with the
    stages in their order, and with them in the best one. Exits with 1 if a link could not be measured.
    """
    wanted = f"/mesh/links?probes={probes}&bulk_bytes={megabytes * _MB}"
    found = ask_head(url.rstrip("/") + wanted, key_of(api_key_file), method="POST", timeout_s=_TIMEOUT_S)
    if is_json:
        click.echo(json.dumps(found, indent=2))
    else:
        from mesh.commands.links_table import print_links  # noqa: PLC0415 - rich is not needed for JSON

        print_links(found)
    if any(link["failure"] for link in found["links"]):
        click.get_current_context().exit(1)
