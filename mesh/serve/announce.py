"""What `mesh serve` prints for a person, on standard output."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import click
import structlog

from mesh.cluster.join_token import decode
from stages.cutting.gguf_parts import model_name

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
    """Where the model answers, and a line to try it."""
    num_stages = len(state.plan.stages) if state.plan is not None else 0
    reason = state.plan.reason if state.plan is not None else ""
    auth = ' -H "Authorization: Bearer $MESH_API_KEY"' if options.api_key_path is not None else ""
    log.info("serving", url=url, model=model_name(options.model), stages=num_stages)
    _say(f"\n{model_name(options.model)} is served at {url}/v1 in {_stages(num_stages)} ({reason}). Try:\n")
    _say(
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{auth} \\\n"
        f"    -d '{_QUESTION}'\n"
    )
    if options.num_hosts == 0:
        print_join_line(head.token)
    _say("Ctrl-C stops it.")


def _say(text: str) -> None:
    # Serving goes on though nobody may read this: `mesh serve | head`.
    with contextlib.suppress(OSError):
        click.echo(text)


def _stages(count: int) -> str:
    return "one stage" if count == 1 else f"{count} stages"
