"""`mesh status`: what a running mesh is doing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final
from urllib import error, request

import click

from mesh.commands.options import read_first_key
from spanmesh_proto.errors import ClusterError, Unauthorized

_TIMEOUT_S: Final = 5.0


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
    answer = _ask(url.rstrip("/") + "/mesh/status", key)
    if is_json:
        click.echo(json.dumps(answer, indent=2))
        return
    from mesh.commands.status_table import print_status  # noqa: PLC0415 - rich is not needed for JSON

    print_status(answer)


def _ask(url: str, key: str | None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} does not start with http:// or https://", param_hint="--url")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # No proxy: a mesh is on this machine or next to it.
    opener = request.build_opener(request.ProxyHandler({}))
    try:
        with opener.open(request.Request(url, headers=headers), timeout=_TIMEOUT_S) as response:  # noqa: S310
            answer: object = json.load(response)
    except error.HTTPError as failure:
        with failure:
            if failure.code in {401, 403}:
                raise Unauthorized(
                    f"{url} wants another API key; give it by --api-key-file or MESH_API_KEY"
                ) from None
            raise ClusterError(f"{url} answered {failure.code}: is it a mesh?") from None
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "reason", failure)
        raise ClusterError(f"no mesh answers at {url} ({reason}); start one with `mesh serve`") from None
    if not isinstance(answer, dict):
        raise ClusterError(f"{url} did not answer like a mesh")
    return answer
