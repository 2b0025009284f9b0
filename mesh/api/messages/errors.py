"""Errors of /v1/messages in the shape of Anthropic's API, and the form of its streams.

Requests are refused in many places, by middleware too. So errors are rewritten where they leave.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from mesh.api import server_sent_events
from mesh.api.errors import error_body, json_bytes
from mesh.api.event_stream import StreamForm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATH: Final = "/v1/messages"
_REQUEST_ID: Final = b"x-request-id"
_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ELSE: Final = "api_error"
_TOO_LONG: Final = "context_length_exceeded"
_BY_TYPE: Final = {
    "invalid_request_error": "invalid_request_error",
    "rate_limit_error": "rate_limit_error",
    "authentication_error": "authentication_error",
}


class MessagesErrors:
    """Middleware that rewrites error responses of this API, and names the request as its clients expect.

    Args:
        app: Next ASGI app.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == PATH or path.startswith(f"{PATH}/")):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Rewriter(send).send)


class _Rewriter:
    """One response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        """Pass on, or hold until the error is whole."""
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            headers += [(b"request-id", value) for name, value in headers if name == _REQUEST_ID]
            message = {**message, "headers": headers}
            if message["status"] >= 400:
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_error(self._start)
            return
        await self._send(message)

    async def _send_error(self, start: Message) -> None:
        headers = dict(start["headers"])
        body = self._body
        try:
            refused = json.loads(body)["error"]
            message = refused["message"]
            if refused.get("code") == _TOO_LONG:
                # Clients look for these words, and compact the conversation.
                message = f"prompt is too long: {message}"
        except (ValueError, KeyError, TypeError):
            pass
        else:
            # With the fields of this server's other errors, which clients of Anthropic's do not read.
            error = {**refused, "type": _KINDS.get(start["status"], _ELSE), "message": message}
            request_id = headers.get(_REQUEST_ID, b"").decode("latin-1") or None
            body = json_bytes({"type": "error", "error": error, "request_id": request_id})
        headers[b"content-length"] = str(len(body)).encode()
        await self._send({**start, "headers": list(headers.items())})
        await self._send({"type": "http.response.body", "body": body})


def encoded(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Events of a stream, each named by its type."""
    return b"".join(server_sent_events.event(json_bytes(event), event["type"]) for event in events)


def error_event(error: BaseException) -> bytes:
    """Event that ends a stream with an error."""
    told = error_body(error)["error"]
    kind = _BY_TYPE.get(str(told["type"]), _ELSE)
    return encoded([{"type": "error", "error": {"type": kind, "message": told["message"]}}])


MESSAGES_STREAM: Final = StreamForm(server_sent_events.MEDIA_TYPE, server_sent_events.comment, error_event)
"""Form of streams of messages."""
