"""One log line per request, an id for each, and the last catch for what nobody expected."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import structlog
from starlette.requests import ClientDisconnect

from mesh.api.auth import KEY_NAME
from mesh.api.errors import error_response
from mesh.api.unexpected import log_unexpected

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = structlog.get_logger()

# nginx's code for a client that left before its answer; only the log ever shows it.
CLIENT_GONE_STATUS: Final = 499
_MAX_PATH_CHARS: Final = 200


class RequestLog:
    """Middleware. What clients write (query, headers, body) is never logged.

    Args:
        app: What lies behind it.
        random_bits: Random numbers of so many bits.
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
                    raise  # part of a response is out: only cutting the connection is left
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
