"""`mesh join`, `mesh drain` and `mesh evict`."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click

from mesh.cli.head_client import ask_head
from mesh.cli.options import OptionsCommand, made
from mesh.cli.shared_options import head_options, key_of, use_storage
from mesh.options.host import JOINING, WEIGHTS, JoinOptions
from mesh.options.model import PLACEMENT, SESSIONS
from mesh.util.printable import say

# Weights of the layers may have to be sent first.
_DRAIN_TIMEOUT_S: Final = 1800.0
# The head waits for its disk before it answers, ten seconds at most.
_EVICT_TIMEOUT_S: Final = 30.0
_SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    JOINING: ("--token-file",),
    **dict.fromkeys((PLACEMENT, SESSIONS, WEIGHTS), ()),
}


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


@click.command(cls=OptionsCommand, options=JoinOptions, sections=_SECTIONS)
@click.argument("token", required=False)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Read the token from this file, or - for standard input; process lists then do not show it.",
)
def join(token: str | None, token_file: Path | None, *, discover: bool, **values: Any) -> int:
    """Join the mesh that printed TOKEN with this host.

    Ctrl-C leaves it once its layers have moved to another host; a second Ctrl-C leaves at once.
    """
    from mesh.cluster.join_token import decode, read_token  # noqa: PLC0415 - keeps --help quick

    if discover and token is None and token_file is None:
        return _list_heads()
    match token, token_file:
        case str(text), None:
            pass
        case None, Path() as path:
            text = read_token(path)
        case _:
            raise click.UsageError("give the join token, or --token-file, and not both")
    decode(text)
    options = made(JoinOptions, {**values, "discover": discover, "token": text})
    from mesh.cluster.addresses import advertised  # noqa: PLC0415 - keeps --help quick
    from mesh.cluster.join import join_mesh  # noqa: PLC0415
    from mesh.util.tasks import run_interruptible  # noqa: PLC0415 - brings grpc, which a refusal needs not

    found = options.changed(
        name=options.name or socket.gethostname(),
        advertise=advertised(options.advertise) if options.advertise else None,
    )
    use_storage(found)
    return run_interruptible(lambda interruption: join_mesh(found, interruption))


def _list_heads() -> int:
    """Print the heads found; exit code 1 if there are none."""
    from mesh.cluster.discovery import discover_heads  # noqa: PLC0415 - keeps --help quick

    heads = asyncio.run(discover_heads())
    for head in heads:
        say(f"{head.name} at {head.address}, spanmesh {head.software}, certificate {head.fingerprint}")
    if not heads:
        say("no head was found: `mesh serve --discoverable` must run in this network", err=True)
        return 1
    say("to join one, give the token that it printed: mesh join --discover TOKEN", err=True)
    return 0
