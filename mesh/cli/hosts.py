"""`mesh drain` and `mesh evict`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import click

from mesh.cli.head_client import ask_head
from mesh.cli.shared_options import head_options, key_of
from mesh.util.printable import say

if TYPE_CHECKING:
    from pathlib import Path


# Weights of the layers may have to be sent first.
_DRAIN_TIMEOUT_S: Final = 1800.0
# The head waits for its disk before it answers, ten seconds at most.
_EVICT_TIMEOUT_S: Final = 30.0


@click.command()
@click.argument("name")
@head_options
def drain(name: str, url: str, api_key_file: Path | None) -> None:
    """Move the layers of host NAME to others while requests go on, then let it leave.

    To be run on the head. If no other host can hold them, nothing changes and an error says so.
    """
    answer = ask_head(
        f"{url.rstrip('/')}/mesh/drain?host={quote(name)}",
        key_of(api_key_file),
        method="POST",
        timeout_s=_DRAIN_TIMEOUT_S,
    )
    if answer.get("drained") is False:
        say(f"{name} was lost before its layers had moved; they are recovered as after a failure.")
    else:
        say(f"{name} holds no layers now and has left the mesh.")


@click.command()
@click.argument("name")
@head_options
def evict(name: str, url: str, api_key_file: Path | None) -> None:
    """Disconnect host NAME at once; its layers are recovered as after a failure.

    To be run on the head. The host cannot join again, and the join token is replaced: `mesh serve` prints the
    new `mesh join` line. Other hosts stay joined.
    """
    ask_head(
        f"{url.rstrip('/')}/mesh/evict?host={quote(name)}",
        key_of(api_key_file),
        method="POST",
        timeout_s=_EVICT_TIMEOUT_S,
    )
    say(f"{name} was removed. The old join token is void; `mesh serve` printed a new one.")
