"""Middleware: CORS, host header, tracing, request log and unexpected errors."""

from __future__ import annotations

import ipaddress
import socket
import time
import traceback
from typing import TYPE_CHECKING, Final, Protocol

import structlog
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from mesh.api.auth import ANY_ORIGIN, KEY_NAME
from mesh.api.errors import error_response
from spanmesh_proto.addresses import is_loopback
from spanmesh_proto.errors import MisdirectedRequest, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from mesh.metrics.tracing import RequestTracer

_READING: Final = frozenset({"GET", "HEAD"})
_HARMLESS: Final = _READING | {"OPTIONS"}
_STRANGE_PAGE: Final = Unauthorized(
    "web pages cannot use this server: name their origin with --cors-origin, or give the server API keys"
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
_PREFIX: Final = "/v1/"
# Routes that operators use.
_MESH_PREFIX: Final = "/mesh/"
# Routes of OpenAI's API that some clients ask for without their prefix.
_OPENAI_ROUTES: Final = ("chat/completions", "completions", "embeddings", "models", "responses")
_SHOWN_CHARS: Final = 100
_CARRIED: Final = {b"traceparent": "traceparent", b"tracestate": "tracestate"}
# nginx's code for a client that disconnected before its answer; only used in the log.
CLIENT_GONE_STATUS: Final = 499
_MAX_PATH_CHARS: Final = 200

log = structlog.get_logger()


class Rewriter(Protocol):
    """Of one response."""

    async def send(self, message: Message) -> None:
        """Take a message of the response."""


class Cors:
    """Middleware for CORS. Pages of the named origins get answers to preflights and may read answers.

    For any other page a preflight is a request like any other, without a key or with the wrong method, and no
    header lets the page read the answer. Browsers send some requests of such pages without a preflight; where
    no key is needed, those that could change something are refused, unless the page is this server's own.

    Args:
        app: Next ASGI app.
        origins: Origins as a browser writes them; `*` stands for all.
        has_keys: Whether the API needs keys, which other pages do not have.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], *, has_keys: bool) -> None:
        self._app = app
        self._has_keys = has_keys
        self._origins = frozenset(origins)
        self._open = CORSMiddleware(
            app,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            # Clients send headers of their own; there are no cookies to protect.
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=_READABLE,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, through Starlette's middleware for allowed origins, or refuse."""
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


class Unprefixed:
    """Middleware that reads `/chat/completions` and its like as `/v1/chat/completions`.

    Args:
        app: Next ASGI app.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, with the prefix."""
        path = scope.get("path", "").removeprefix("/")
        if any(path == route or path.startswith(f"{route}/") for route in _OPENAI_ROUTES):
            scope = {**scope, "path": _PREFIX + path, "raw_path": (_PREFIX + path).encode()}
        await self._app(scope, receive, send)


# Against DNS rebinding: a page of `evil.example` may resolve that name to 127.0.0.1 after it was loaded, and
# its scripts then reach the server there as if it were their own. The Host header, which a page cannot
# choose, reveals it. Not needed where keys are: such a page has none.
class Rewritten:
    """Middleware by which an API rewrites responses to its requests, errors of other parts included.

    Args:
        app: Next ASGI app.
        path: Path of the API; what lies below it belongs to it.
        response: Makes the rewriter of one response, from what sends it on; its `send` takes messages.
    """

    def __init__(self, app: ASGIApp, path: str, response: Callable[[Send], Rewriter]) -> None:
        self._app = app
        self._path = path
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        path = scope.get("path", "")
        if scope["type"] == "http" and (path == self._path or path.startswith(f"{self._path}/")):
            send = self._response(send).send
        await self._app(scope, receive, send)


class Answered:
    """Middleware that has answers of its own to some GET and HEAD.

    Args:
        app: Next ASGI app.
        answer: Returns the answer to a request; None to pass it on.
    """

    def __init__(self, app: ASGIApp, answer: Callable[[Scope], ASGIApp | None]) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        reads = scope["type"] == "http" and scope["method"] in _READING
        own = self._answer(scope) if reads else None
        await (own or self._app)(scope, receive, send)


class LocalHosts:
    """Middleware that refuses requests whose Host header names another machine.

    Args:
        app: Next ASGI app.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on or answer 421. HTTP/1.0 may omit the header; no browser does."""
        named = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if all(map(names_this_machine, named)):
            await self._app(scope, receive, send)
            return
        log.warning("host_header_refused", host=named[0][:_SHOWN_CHARS])
        error = MisdirectedRequest(
            "this server answers to localhost only, since it has no API keys: use http://127.0.0.1,"
            " or give it keys with --api-key-file"
        )
        await error_response(error)(scope, receive, send)


class Traced:
    """Middleware behind the key gate: refused requests leave no span.

    Args:
        app: Next ASGI app.
        tracer: Makes the spans; None makes none.
        model: Model name of the first model.
    """

    def __init__(self, app: ASGIApp, tracer: RequestTracer | None, model: str) -> None:
        self._app = app
        self._tracer = tracer
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, within a span if the request gets one."""
        tracer = self._tracer
        if tracer is None or not _is_of_models(scope):
            await self._app(scope, receive, send)
            return
        headers = {
            _CARRIED[name]: value.decode("latin-1") for name, value in scope["headers"] if name in _CARRIED
        }
        # A path may contain any name: only its first parts are routes, and few.
        path = "/".join(scope["path"].split("/")[:4])
        with tracer.request(scope["method"], path, headers, self._model) as span:

            async def send_noting_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.responded(message["status"])
                await send(message)

            await self._app(scope, receive, send_noting_status)


class RequestLog:
    """Middleware that logs requests, without what clients send: query, headers and body.

    Args:
        app: Next ASGI app.
        random_bits: Returns a random integer of the given number of bits.
    """

    def __init__(self, app: ASGIApp, random_bits: Callable[[int], int]) -> None:
        self._app = app
        self._random_bits = random_bits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; log when the response is complete."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req-{self._random_bits(64):016x}"
        status = CLIENT_GONE_STATUS

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        started_s = time.perf_counter()
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except ClientDisconnect:
                log.info("client_gone")
            except Exception as error:
                log_unexpected(error)
                if status != CLIENT_GONE_STATUS:
                    raise  # part of a response is sent: the connection can only be closed
                await error_response(error)(scope, receive, send_with_id)
            finally:
                log.info(
                    "request",
                    method=scope["method"],
                    path=scope["path"][:_MAX_PATH_CHARS],
                    status=status,
                    duration_ms=round((time.perf_counter() - started_s) * 1000, 1),
                    key=scope.get(KEY_NAME),
                )


def _is_of_models(scope: Scope) -> bool:
    """Whether a request is about models or their answers, not about the mesh."""
    if scope["type"] != "http":
        return False
    path: str = scope["path"]
    if path.startswith(_PREFIX):
        return True
    if scope["method"] != "POST" or path.startswith(_MESH_PREFIX):
        return False
    # Names of spans are to be few: a path that is no route may be anything.
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)


def is_own_origin(origin: str, host_header: str) -> bool:
    """Whether a browser's Origin is this server's own, by a name that only this machine can have.

    Origin and host agree for a page of `evil.example`, too, once its owner resolves that name to this machine
    (DNS rebinding). So the name must be an address, `localhost`, or this machine's own name.

    Args:
        origin: Such as `http://127.0.0.1:8000`.
        host_header: Such as `127.0.0.1:8000`.
    """
    scheme, _, place = origin.partition("://")
    if scheme not in {"http", "https"} or not place or place.lower() != host_header.strip().lower():
        return False
    name = place[1:].partition("]")[0] if place.startswith("[") else place.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        own = socket.gethostname().lower()
        return names_this_machine(name) or name.lower() in {own, f"{own}.local"}
    return True


def names_this_machine(host_header: str) -> bool:
    """Whether a Host header names this machine; its port does not matter.

    Args:
        host_header: Such as `localhost:8000`, `127.0.0.1` or `[::1]:8000`.
    """
    name = host_header.strip()
    if name.startswith("["):
        return is_loopback(name[1:].partition("]")[0])
    name = name.partition(":")[0].lower().removesuffix(".")
    # Names below localhost lead to loopback by RFC 6761: no owner of a name can lead them elsewhere.
    return is_loopback(name) or name.endswith(".localhost")


def log_unexpected(error: BaseException) -> None:
    """Log the place of an error, without its text and local variables, which may contain a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    log.error(
        "request_failed_unexpectedly",
        error=type(error).__name__,
        at=[f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames)],
    )
