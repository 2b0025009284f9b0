"""HTTP client of a head."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar
from urllib import error, request

import click

from spanmesh_proto.errors import ClusterError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TIMEOUT_S: Final = 5.0
Answer = TypeVar("Answer")


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
    answer: object = _exchange(url, key, json.load, method=method, body=body, timeout_s=timeout_s)
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
    return _exchange(url, key, lambda response: str(response.read(), "utf-8"), timeout_s=timeout_s)


_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
# Advice when a connected head does not answer, by method.
_PATIENCE: Final = {
    "GET": "it is busy or hangs; try again, or see what `mesh serve` printed",
    "POST": "what was asked for may still be done; see `mesh status`, or what `mesh serve` printed, before "
    "you try again",
}


class _NoRedirects(request.HTTPRedirectHandler):
    """Makes a redirection an error: the API key is for the named server only."""

    def redirect_request(self, *_arguments: object) -> None:
        """Returns None: no request follows, and the answer counts as an error."""


def _exchange(
    url: str,
    key: str | None,
    read: Callable[[Any], Answer],
    *,
    method: Literal["GET", "POST"] = "GET",
    body: Mapping[str, Any] | None = None,
    timeout_s: float,
) -> Answer:
    """What `read` makes of the head's answer; raises as `ask_head`."""
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} does not start with http:// or https://", param_hint="--url")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # No proxy: a mesh is on this machine or next to it.
    opener = request.build_opener(request.ProxyHandler({}), _NoRedirects)
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    asked = request.Request(url, data, headers=headers, method=method)  # noqa: S310 - checked above
    try:
        with opener.open(asked, timeout=timeout_s) as response:
            return read(response)
    except error.HTTPError as failure:
        with failure:
            said = _refusal(failure)
            if failure.code in {401, 403}:
                # A valid key may lack the right: some requests are for the head's own machine only.
                is_of_key = said is None or "API key" in said
                wish = f"{url} needs another API key; give it with --api-key-file or MESH_API_KEY"
                raise Unauthorized(wish if is_of_key else str(said)) from None
            if failure.code in _REDIRECTS:
                there = failure.headers.get("Location", "")
                raise ClusterError(f"{url} is not a mesh: it sends elsewhere, to {there!r}") from None
            raise ClusterError(said or f"{url} answered {failure.code}: it may not be a mesh") from None
    except TimeoutError:
        raise ClusterError(f"{url} did not answer within {timeout_s:g} s: {_PATIENCE[method]}") from None
    except (OSError, ValueError, HTTPException) as failure:
        if isinstance(getattr(failure, "reason", None), TimeoutError):
            # It was not even connected to.
            raise ClusterError(
                f"{url} did not answer within {timeout_s:g} s: it hangs, the address is not the head's, or a "
                "firewall is in the way"
            ) from None
        # For a server that is not HTTP, urllib does not catch http.client's own errors.
        reason = str(getattr(failure, "reason", failure)).strip() or type(failure).__name__
        raise ClusterError(
            f"no mesh answers at {url} ({reason}); start one with `mesh serve`, or give the address at "
            "which it listens with --url"
        ) from None


def _refusal(failure: error.HTTPError) -> str | None:
    """The mesh's own error text; None if the answer is not a mesh's."""
    try:
        message = json.load(failure)["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError, HTTPException):
        return None
    return str(message)
