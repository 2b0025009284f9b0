"""An open API on this machine answers only to this machine's own names.

Against DNS rebinding: a web page of `evil.example` may let that name lead to 127.0.0.1 after it was loaded,
and its scripts then talk to the server there as if it were their own. What gives it away is the Host header,
which a page cannot choose. Where keys are needed this is not: a page has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from mesh.api.errors import error_response
from mesh.cluster.addresses import is_loopback
from spanmesh_proto.errors import MisdirectedRequest

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

log = structlog.get_logger()

_SHOWN_CHARS: Final = 100


def names_this_machine(host_header: str) -> bool:
    """Whether a Host header names this machine; its port does not matter.

    Args:
        host_header: Such as `localhost:8000`, `127.0.0.1` or `[::1]:8000`.
    """
    name = host_header.strip()
    if name.startswith("["):
        return is_loopback(name[1:].partition("]")[0])
    return is_loopback(name.partition(":")[0])


class LocalHosts:
    """Middleware that turns away requests whose Host header names another machine.

    Args:
        app: What lies behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on or answer 421. HTTP/1.0 may leave the header out; no browser does."""
        named = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if all(map(names_this_machine, named)):
            await self._app(scope, receive, send)
            return
        log.warning("host_header_refused", host=named[0][:_SHOWN_CHARS])
        error = MisdirectedRequest(
            "this server answers to localhost only, since it asks for no API key: call it by http://127.0.0.1,"
            " or give it keys with --api-key-file"
        )
        await error_response(error)(scope, receive, send)
