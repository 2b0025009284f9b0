"""The one gate that every request but `/health` must pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.api.allowance import VISIT, Allowances
from mesh.api.errors import error_response
from spanmesh_proto.errors import RequestError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from mesh.api.api_keys import ApiKeys
    from mesh.api.key_line import KeyRecord

OPEN_PATHS: Final = frozenset({"/health"})
KEY_NAME: Final = "spanmesh.key_name"
_CLIENT: Final = "spanmesh.client"


def client_of(scope: Scope) -> str | None:
    """Whose request it is: the identity of the key that it came with; None where the API is open."""
    client: str | None = scope.get(_CLIENT)
    return client


class KeyGate:
    """Middleware that lets a request through with a valid key only, whether its route exists or not.

    Args:
        app: What lies behind it.
        keys: None opens the gate.
        now_s: Unix seconds, for keys that expire.
        steady_s: A steady clock, in seconds, for limits per minute.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys | None,
        now_s: Callable[[], float],
        steady_s: Callable[[], float],
    ) -> None:
        self._app = app
        self._keys = keys
        self._now_s = now_s
        self._allowances = Allowances(steady_s)
        if keys is not None:
            keys.on_removed(self._allowances.forget)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on or answer 401, or 429 if the key has used up its share."""
        if self._keys is None or scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            record = self._authorize(scope, self._keys)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        scope[KEY_NAME], scope[_CLIENT] = record.name, record.identity
        scope[VISIT] = visit = self._allowances.visit(record)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *visit.headers()]
            await send(message)

        try:
            visit.begin()
        except RequestError as error:
            await error_response(error)(scope, receive, send_with_limits)
            return
        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            # However the request ended.
            visit.settle()

    def _authorize(self, scope: Scope, keys: ApiKeys) -> KeyRecord:
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = headers[0].decode("latin-1").partition(" ") if headers else ("", "", "")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("this server needs an API key: send the header `Authorization: Bearer <key>`")
        record = keys.find(key.strip())
        if record is None:
            raise Unauthorized("the API key is not one of this server's: ask whoever runs it for one")
        if record.is_expired(self._now_s()):
            raise Unauthorized(f"the API key {record.name} has expired: ask whoever runs it for another one")
        return record
