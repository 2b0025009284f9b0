"""HTTP application: composition of routes and middleware."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from mesh.api import admin, chat_completions, completions, embeddings, server_info, tokenization, web_ui
from mesh.api.auth import KeyGate
from mesh.api.bodies import BodyBudget, BoundedBodies
from mesh.api.errors import on_http_exception, on_mesh_error
from mesh.api.event_stream import ClientGoneError, on_client_gone
from mesh.api.messages import endpoint as messages
from mesh.api.messages.events import PATH, MessagesResponse
from mesh.api.middleware import Answered, Cors, RequestLog, Rewritten, Traced, Unprefixed
from mesh.api.on_demand import ReleasedLeases
from mesh.api.openapi import DocumentedApp
from mesh.api.responses import endpoint as responses
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fastapi import FastAPI

    from mesh.api.api_keys import ApiKeys
    from mesh.api.backend import Backends
    from mesh.metrics.tracing import RequestTracer


def create_app(
    backends: Backends,
    *,
    api_keys: ApiKeys | None,
    cors_origins: Sequence[str] = (),
    tracer: RequestTracer | None = None,
) -> FastAPI:
    """The API of the served models. Run it with `mesh.api.http_server.serve_api`.

    Unless an origin is named there is no CORS header, so pages of other origins cannot read answers.

    Args:
        backends: Served models; more may be added and removed later.
        api_keys: Keys that open the API; None opens it without a key.
        cors_origins: Origins of web pages that may use it; see `auth.check_origins`.
        tracer: Makes a span for each request to a model; None makes none.
    """
    api = backends.first.api
    app = DocumentedApp(
        title="spanmesh",
        version=version("spanmesh"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
        exception_handlers={
            MeshError: on_mesh_error,
            HTTPException: on_http_exception,
            ClientGoneError: on_client_gone,
        },
        middleware=[
            Middleware(Unprefixed),
            Middleware(Rewritten, path=PATH, response=MessagesResponse),
            Middleware(RequestLog, random_bits=api.random_bits),
            Middleware(Cors, origins=cors_origins, has_keys=api_keys is not None),
            Middleware(Answered, answer=partial(web_ui.page_answer, has_keys=api_keys is not None)),
            Middleware(KeyGate, keys=api_keys, now_s=api.now_s, steady_s=api.steady_s),
            Middleware(BoundedBodies, budget=BodyBudget(body_bytes=backends.most_body_bytes)),
            Middleware(ReleasedLeases),
            Middleware(Traced, tracer=tracer, model=backends.first.model_id),
        ],
    )
    if api_keys is not None:
        api.responses.follow(api_keys)

        def end_waiting(removed: Collection[str]) -> None:
            if (on_demand := api.on_demand()) is not None:
                on_demand.forget(removed)

        api_keys.on_removed(end_waiting)
    app.state.backends = backends
    app.state.api_keys = api_keys
    inference = (chat_completions, completions, responses, messages, embeddings, tokenization)
    for endpoints in (*inference, server_info, admin, web_ui):
        app.include_router(endpoints.router)
    return app
