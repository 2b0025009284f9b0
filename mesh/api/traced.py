"""A span for each request to the model, where spans are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from mesh.metrics.tracing import RequestTracer

_PREFIX: Final = "/v1/"
_CARRIED: Final = {b"traceparent": "traceparent", b"tracestate": "tracestate"}


class Traced:
    """Middleware behind the gate: who may not ask leaves no span.

    Args:
        app: What lies behind it.
        tracer: Makes the spans; None makes none.
        model: The served one.
    """

    def __init__(self, app: ASGIApp, tracer: RequestTracer | None, model: str) -> None:
        self._app = app
        self._tracer = tracer
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, within a span if the request has one."""
        tracer = self._tracer
        if tracer is None or scope["type"] != "http" or not scope["path"].startswith(_PREFIX):
            await self._app(scope, receive, send)
            return
        headers = {
            _CARRIED[name]: value.decode("latin-1") for name, value in scope["headers"] if name in _CARRIED
        }
        # A path may name anything: only its first parts are ours, and few.
        path = "/".join(scope["path"].split("/")[:4])
        with tracer.request(scope["method"], path, headers, self._model) as span:

            async def send_noting_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.responded(message["status"])
                await send(message)

            await self._app(scope, receive, send_noting_status)
