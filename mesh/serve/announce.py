"""What `mesh serve` prints for a person, on standard output."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import TYPE_CHECKING, Final

import click
import structlog

from mesh.cluster.join_token import decode
from spanmesh_proto.addresses import join_address, split_address
from stages.gguf.reader import model_name

if TYPE_CHECKING:
    from mesh.serve.head import Head
    from mesh.serve.options import ServeOptions
    from mesh.serve.state import MeshState

log = structlog.get_logger()

_QUESTION: Final = (
    '{"model": "default", "messages": [{"role": "user", "content": "Who are you?"}],'
    ' "temperature": 0, "max_tokens": 64}'
)


def print_join_line(token: str) -> None:
    """The line that lets a host join, and what must not be in its way."""
    _say(
        f"\nOn every host that shall take a share:\n\n  mesh join {token}\n\n"
        f"It reaches this host at TCP {decode(token).addresses[0]} first. Ray and the stages take free ports "
        "of every host:\nlet all TCP through among them, and none of it from elsewhere.\n"
    )


def print_served(options: ServeOptions, state: MeshState, url: str, head: Head) -> None:
    """Where the model answers, and a line to try it, from any of the hosts that reach it."""
    log.info("serving", url=url, model=model_name(options.model), stages=_num_stages(state))
    url = reachable(url, head.own.address)
    num_stages = _num_stages(state)
    reason = state.plan.reason if state.plan is not None else ""
    auth = ' -H "Authorization: Bearer $MESH_API_KEY"' if options.api_key_path is not None else ""
    _say(f"\n{model_name(options.model)} is served at {url}/v1 in {_stages(num_stages)} ({reason}). Try:\n")
    _say(
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{auth} \\\n"
        f"    -d '{_QUESTION}'\n"
    )
    if options.num_hosts == 0:
        print_join_line(head.token)
    _say("Ctrl-C stops it.")


def reachable(url: str, address: str) -> str:
    """A URL that leads to the server: one that listens at 0.0.0.0 is not to be found there.

    Args:
        url: Where it listens.
        address: Where other hosts reach its host.
    """
    listens_at, port = split_address(url.removeprefix("http://"))
    if not ipaddress.ip_address(listens_at).is_unspecified:
        return url
    return f"http://{join_address(address, port)}"


def _num_stages(state: MeshState) -> int:
    return 0 if state.plan is None else len(state.plan.stages)


def _say(text: str) -> None:
    # Serving goes on though nobody may read this: `mesh serve | head`.
    with contextlib.suppress(OSError):
        click.echo(text)


def _stages(count: int) -> str:
    return "one stage" if count == 1 else f"{count} stages"
