"""HTTP client of a head."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib import error, request

import click

from spanmesh_proto.errors import ClusterError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIMEOUT_S: Final = 5.0


def ask_head(
    url: str,
    key: str | None,
    *,
    method: Literal["GET", "POST"] = "GET",
    body: Mapping[str, Any] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> dict[str, Any]:
    """JSON object that the head answers.

    Args:
        url: URL with the path.
        key: API key, if the mesh needs one.
        method: HTTP method.
        body: Body, sent as JSON; None for none.
        timeout_s: Longest silence, in seconds.

    Raises:
        Unauthorized: If the key is missing or wrong.
        ClusterError: If no mesh answers, or with an error.
    """
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} does not start with http:// or https://", param_hint="--url")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # No proxy: a mesh is on this machine or next to it.
    opener = request.build_opener(request.ProxyHandler({}))
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    asked = request.Request(url, data, headers=headers, method=method)  # noqa: S310 - checked above
    try:
        with opener.open(asked, timeout=timeout_s) as response:
            answer: object = json.load(response)
    except error.HTTPError as failure:
        with failure:
            said = _refusal(failure)
            if failure.code in {401, 403}:
                # A valid key may lack the right: some requests are for the head's own machine only.
                is_of_key = said is None or "API key" in said
                wish = f"{url} needs another API key; give it with --api-key-file or MESH_API_KEY"
                raise Unauthorized(wish if is_of_key else str(said)) from None
            raise ClusterError(said or f"{url} answered {failure.code}: it may not be a mesh") from None
    except (OSError, ValueError, HTTPException) as failure:
        # For a server that is not HTTP, urllib does not catch http.client's own errors.
        reason = str(getattr(failure, "reason", failure)).strip() or type(failure).__name__
        raise ClusterError(f"no mesh answers at {url} ({reason}); start one with `mesh serve`") from None
    if not isinstance(answer, dict):
        raise ClusterError(f"{url} did not answer as a mesh does")
    return answer


def _refusal(failure: error.HTTPError) -> str | None:
    """The mesh's own error text; None if the answer is not a mesh's."""
    try:
        message = json.load(failure)["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError, HTTPException):
        return None
    return str(message)
