"""HTTP client of a head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import click
import httpx

from spanmesh_proto.errors import ClusterError, Unauthorized
from stages.tls import authorities_for

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIMEOUT_S: Final = 5.0
# Advice when a connected head does not answer, by method.
_PATIENCE: Final = {
    "GET": "it is busy or hangs; try again, or see what `mesh serve` printed",
    "POST": "what was asked for may still be done; see `mesh status`, or what `mesh serve` printed, before "
    "you try again",
}


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
    response = _exchange(url, key, method=method, body=body, timeout_s=timeout_s)
    answer = _json_of(response)
    if not isinstance(answer, dict):
        raise ClusterError(f"{url} did not answer as a mesh does")
    return answer


def head_text(url: str, key: str | None, *, timeout_s: float = _TIMEOUT_S) -> str:
    """Text that the head answers to a GET, such as its metrics.

    Args:
        url: URL with the path.
        key: API key, if the mesh needs one.
        timeout_s: Longest silence, in seconds.

    Raises:
        Unauthorized: If the key is missing or wrong.
        ClusterError: If no mesh answers, or with an error.
    """
    return _exchange(url, key, timeout_s=timeout_s).text


def _exchange(
    url: str,
    key: str | None,
    *,
    method: Literal["GET", "POST"] = "GET",
    body: Mapping[str, Any] | None = None,
    timeout_s: float,
) -> httpx.Response:
    """The head's answer, a success; raises as `ask_head`."""
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} does not start with http:// or https://", param_hint="--url")
    try:
        response = httpx.request(
            method,
            url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            json=body,
            timeout=timeout_s,
            verify=authorities_for(url),
            # No proxy: a mesh is on this machine or next to it.
            trust_env=False,
            # The API key is for the named server only.
            follow_redirects=False,
        )
    except httpx.ConnectTimeout:
        raise ClusterError(
            f"{url} did not answer within {timeout_s:g} s: it hangs, the address is not the head's, or a "
            "firewall is in the way"
        ) from None
    except httpx.TimeoutException:
        raise ClusterError(f"{url} did not answer within {timeout_s:g} s: {_PATIENCE[method]}") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ClusterError(
            f"no mesh answers at {url} ({str(error).strip() or type(error).__name__}); start one with `mesh "
            "serve`, or give the address at which it listens with --url"
        ) from None
    if not response.is_success:
        raise _refusal(url, response)
    return response


def _refusal(url: str, response: httpx.Response) -> ClusterError | Unauthorized:
    try:
        said: str | None = str(_json_of(response)["error"]["message"])
    except (KeyError, TypeError):
        said = None
    if response.status_code in {401, 403}:
        # A valid key may lack the right: some requests are for the head's own machine only.
        is_of_key = said is None or "API key" in said
        wish = f"{url} needs another API key; give it with --api-key-file or MESH_API_KEY"
        return Unauthorized(wish if is_of_key else str(said))
    if response.is_redirect:
        there = response.headers["Location"]
        return ClusterError(f"{url} is not a mesh: it sends elsewhere, to {there!r}")
    return ClusterError(said or f"{url} answered {response.status_code}: it may not be a mesh")


def _json_of(response: httpx.Response) -> Any:
    """Its body; None if that is no JSON."""
    try:
        return response.json()
    except ValueError:
        return None
