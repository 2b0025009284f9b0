"""Which web pages may read answers: none, unless `--cors-origin` names their origin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.middleware.cors import CORSMiddleware

from mesh.api.errors import error_response
from mesh.api.exposure import ANY_ORIGIN
from mesh.api.own_page import is_own_origin
from spanmesh_proto.errors import Unauthorized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

_HARMLESS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_STRANGE_PAGE: Final = Unauthorized(
    "web pages may not use this server: name their origin with --cors-origin, or let it ask for API keys"
)
_READABLE: Final = (
    "Retry-After",
    "X-Request-Id",
    *(
        f"X-Ratelimit-{what}-{of}"
        for of in ("Requests", "Tokens")
        for what in ("Limit", "Remaining", "Reset")
    ),
)


class Cors:
    """Middleware. For pages of named origins preflights are answered and answers may be read.

    For any other page a preflight is a request like any other, without a key or of the wrong method, and no
    header lets the page read what comes back. Browsers send some requests of such pages without asking; where
    no key is needed, those that could change something are refused, unless the page is this server's own.

    Args:
        app: What lies behind it.
        origins: As a browser writes them; `*` stands for all.
        has_keys: Whether the API asks for keys: a page has none.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], *, has_keys: bool) -> None:
        self._app = app
        self._has_keys = has_keys
        self._origins = frozenset(origins)
        self._open = CORSMiddleware(
            app,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            # Clients send headers of their own; no cookie opens anything here.
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=_READABLE,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, by way of Starlette's middleware where the page may, or refuse."""
        origins = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"origin"]
        is_open = any(origin in self._origins or ANY_ORIGIN in self._origins for origin in origins)
        if is_open:
            await self._open(scope, receive, send)
        elif origins and not self._may_change_things(scope, origins):
            await error_response(_STRANGE_PAGE)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may_change_things(self, scope: Scope, origins: Sequence[str]) -> bool:
        if self._has_keys or scope["method"] in _HARMLESS:
            return True
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        return len(origins) == len(hosts) == 1 and is_own_origin(origins[0], hosts[0])
