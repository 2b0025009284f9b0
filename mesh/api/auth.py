"""API-key gate, and checks of what is exposed to other machines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from mesh.api.errors import error_response
from mesh.api.rate_limit import RESERVATION, RateLimits
from mesh.cluster.addresses import is_of_this_machine
from spanmesh_proto.addresses import is_loopback
from spanmesh_proto.errors import Forbidden, MeshError, RequestError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from mesh.api.api_keys import ApiKeys, KeyRecord

OPEN_PATHS: Final = frozenset({"/health"})
# Requests that cost about as much as reading the prompt of a chat does, and have no answer generated.
_COUNTING_PATHS: Final = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/v1/chat/completions/input_tokens",
        "/v1/responses/input_tokens",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
    }
)
KEY_NAME: Final = "spanmesh.key_name"
_CLIENT: Final = "spanmesh.client"
_MAY_LOAD: Final = "spanmesh.may_load"
_MAY_RECORD: Final = "spanmesh.may_record"
# A proxy on this machine has its address, for clients elsewhere.
_MARKS_OF_PROXIES: Final = (
    *("forwarded", "via", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "true-client-ip"),
    *("cf-connecting-ip", "fastly-client-ip", "x-original-forwarded-for", "x-envoy-external-address"),
)
# For, Host, Proto, Port, Server and others; some proxies send only one of them.
_MARKS_BEGIN: Final = "x-forwarded"
ANY_ORIGIN: Final = "*"
# What browsers send for pages in sandboxed frames, which any page may open, and for files.
_ANYBODYS_ORIGINS: Final = frozenset({ANY_ORIGIN, "null", "file://"})
_SITE: Final = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9._-]+)(?P<port>:[1-9]\d{0,4})?")
# Of programs and extensions, whose hosts are names of their own making. Browsers keep their case.
_PROGRAM: Final = re.compile(r"(?!https?:)[a-z][a-z0-9+.-]*://[A-Za-z0-9._~-]+(?P<port>:[1-9]\d{0,4})?")
_IMPLIED_PORTS: Final = {"http": ":80", "https": ":443"}
_HIGHEST_PORT: Final = 65535


class KeyGate:
    """Middleware that lets requests through with a valid key only, whether their route exists or not.

    Args:
        app: Next ASGI app.
        keys: Valid keys; None lets all requests through.
        now_s: Wall clock, Unix seconds, for keys that expire.
        steady_s: Monotonic clock, seconds, for limits per minute.
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
        self._rate_limits = RateLimits(steady_s)
        if keys is not None:
            keys.on_removed(self._rate_limits.forget)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on; or answer 401, or 429 if the key has reached a limit."""
        if self._keys is None or scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            record = self._authorize(scope, self._keys)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        scope[KEY_NAME], scope[_CLIENT] = record.name, record.identity
        scope[_MAY_LOAD], scope[_MAY_RECORD] = record.may_load, record.may_record
        scope[RESERVATION] = reservation = self._rate_limits.reserve(record)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *reservation.headers()]
            await send(message)

        try:
            reservation.begin()
            if scope["path"] in _COUNTING_PATHS:
                reservation.begin_counting()
        except RequestError as error:
            await error_response(error)(scope, receive, send_with_limits)
            return
        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            # However the request ended.
            reservation.settle()

    def _authorize(self, scope: Scope, keys: ApiKeys) -> KeyRecord:
        key = _key_of(scope)
        if not key:
            raise Unauthorized(
                "this server needs an API key: send the header `Authorization: Bearer <key>` or"
                " `X-Api-Key: <key>`"
            )
        record = keys.find(key)
        if record is None:
            raise Unauthorized("the API key is unknown to this server: ask its operator for one")
        if record.is_expired(self._now_s()):
            raise Unauthorized(
                f"the API key {record.name} has expired: ask the server's operator for a new one"
            )
        return record


def client_of(scope: Scope) -> str | None:
    """Identity of the request's API key; None where the API is open."""
    client: str | None = scope.get(_CLIENT)
    return client


def _key_of(scope: Scope) -> str:
    """The key in the headers; empty if there is none. Anthropic's clients send `X-Api-Key`."""
    headers: dict[bytes, str] = {
        name: value.decode("latin-1").strip() for name, value in reversed(scope["headers"])
    }
    scheme, _, key = headers.get(b"authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else headers.get(b"x-api-key", "")


def require_own_machine(request: Request, what: str) -> None:
    """Refuse requests from other machines, or through a proxy that names itself.

    Args:
        request: A request that passed the key gate.
        what: Operation reserved to this machine, such as `hosts are removed`.

    Raises:
        Unauthorized: With a remedy.
    """
    if not is_own_machine(request):
        raise Unauthorized(f"{what} from the head's own machine only: run the command there")


def is_own_machine(request: Request) -> bool:
    """Whether a request comes from this machine, and through no proxy that names itself.

    A server that listens at one address of the machine is asked from there by that address, not by loopback.
    """
    headers = request.headers
    if any(mark in headers for mark in _MARKS_OF_PROXIES):
        return False
    return _comes_from_here(request) and not any(name.startswith(_MARKS_BEGIN) for name in headers)


def _comes_from_here(request: Request) -> bool:
    client, server = request.client, request.scope.get("server")
    if client is None:
        return False
    if is_loopback(client.host):
        return True
    # Looked at anew each time, since addresses change; both ends, so that nothing that leads packets of other
    # machines to this process makes them this machine's.
    return server is not None and is_of_this_machine(client.host, server[0])


def may_load(request: Request) -> bool:
    """Whether a request may have a model of the library loaded.

    Its key must have that right. Where no keys are set, it must come from this machine.

    Args:
        request: A request that passed the key gate.
    """
    right: bool | None = request.scope.get(_MAY_LOAD)
    return is_own_machine(request) if right is None else right


def may_record(scope: Scope) -> bool | None:
    """Whether answers to a request's API key may be recorded; None where the API is open."""
    right: bool | None = scope.get(_MAY_RECORD)
    return right


def load_refusal(request: Request, model: str) -> Forbidden | None:
    """Error, with a remedy, for a request that may not have a model loaded; None if it may.

    Args:
        request: A request that passed the key gate.
        model: Name of the model, which is not loaded.
    """
    if may_load(request):
        return None
    name = request.scope.get(KEY_NAME)
    if name is None:
        return Forbidden(
            f"the model `{model}` is not loaded, and without API keys only the head's own machine may load"
            " models: ask for it there, or give the server keys with --api-key-file",
            param="model",
        )
    return Forbidden(
        f"the model `{model}` is not loaded, and the API key {name} may not load models: have it allowed, by"
        " `may-load=yes` in its line of the key file, which `mesh keys add --may-load` writes, or name a"
        " model that is loaded, as `/v1/models` tells",
        param="model",
    )


def require_key_beyond_loopback(host: str, *, has_keys: bool, is_insecure: bool = False) -> None:
    """Refuse to open an API without keys to other machines.

    Args:
        host: Address on which it is to listen.
        has_keys: Whether it needs a key.
        is_insecure: Whether the operator allows it.

    Raises:
        MeshError: With the remedies.
    """
    if not has_keys and not is_insecure and not is_loopback(host):
        raise MeshError(
            f"--host {host} lets other machines use the model: give --api-key-file (`mesh keys add` makes"
            " one), listen on 127.0.0.1, or allow access without a key with --insecure"
        )


def check_origins(origins: Sequence[str], *, has_keys: bool) -> None:
    """Check the origins of web pages that may use the API.

    Raises:
        MeshError: If one is not an origin, or one that every page may have is allowed and no key is needed.
    """
    for origin in origins:
        if origin in _ANYBODYS_ORIGINS:
            if not has_keys:
                raise MeshError(
                    f"--cors-origin {origin!r} lets every web page opened on this machine use the model: name"
                    " the origins that may, or give --api-key-file",
                    param="--cors-origin",
                )
        elif problem := _problem_of(origin):
            raise MeshError(f"--cors-origin {origin!r} is not an origin: {problem}", param="--cors-origin")


def _problem_of(origin: str) -> str:
    """Reason why no browser sends this as an origin; empty if one may."""
    found = _SITE.fullmatch(origin) or _PROGRAM.fullmatch(origin)
    if found is None:
        return (
            "write it as a browser does, scheme://host or scheme://host:port, in lower case and without a"
            " path, such as https://chat.example.org, app://notes.example or chrome-extension://ID"
        )
    port = found["port"] or ""
    if port and port == _IMPLIED_PORTS.get(origin.partition(":")[0]):
        return f"browsers leave out the port {port[1:]} of this scheme, so leave it out here"
    if port and int(port[1:]) > _HIGHEST_PORT:
        return f"{port[1:]} is no port"
    return ""
