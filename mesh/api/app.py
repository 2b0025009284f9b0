"""HTTP application: composition of routes and middleware."""

from __future__ import annotations

import secrets
import time
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from mesh.api import admin, chat_completions, completions, server_info, tokenization, web_ui
from mesh.api.auth import KeyGate
from mesh.api.backend import Backend, Backends, HostAdmin, HostInspection, LinkRuns, ModelAdmin
from mesh.api.errors import on_http_exception, on_mesh_error
from mesh.api.middleware import Cors, RequestLog, Traced
from mesh.api.openapi import DocumentedApp
from mesh.api.responses import endpoint as responses
from mesh.api.web_ui import PageFiles
from mesh.metrics.request_metrics import ObservedEngine, RequestStatistics
from mesh.text.chat_template import chat_template_of
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from fastapi import FastAPI

    from mesh.api.api_keys import ApiKeys
    from mesh.engine import Engine
    from mesh.metrics.tracing import RequestTracer
    from mesh.text.tokenizer import Tokenizer

DEFAULT_PING_INTERVAL_S: Final = 1.0


def create_app(
    *,
    engine: Engine,
    tokenizer: Tokenizer,
    model_id: str,
    created: int,
    num_slots: int | None = None,
    api_keys: ApiKeys | None,
    status: Callable[[], Mapping[str, Any]],
    ready: Callable[[], bool],
    is_whole: Callable[[], bool] = lambda: True,
    refusal: Callable[[], MeshError | None] = lambda: None,
    now_s: Callable[[], float] = time.time,
    steady_s: Callable[[], float] = time.monotonic,
    random_bits: Callable[[int], int] = secrets.randbits,
    ping_interval_s: float = DEFAULT_PING_INTERVAL_S,
    cors_origins: Sequence[str] = (),
    stage_counts: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]] | None = None,
    measure_links: Callable[[int, int], Awaitable[Mapping[str, Any]]] | None = None,
    host_admin: Callable[[], HostAdmin | None] = lambda: None,
    host_inspection: Callable[[], HostInspection | None] = lambda: None,
    model_admin: Callable[[], ModelAdmin | None] = lambda: None,
    tracer: RequestTracer | None = None,
) -> FastAPI:
    """The API in front of an engine. Run it with `mesh.api.http_server.serve_api`.

    Unless an origin is named there is no CORS header, so pages of other origins cannot read answers.

    Args:
        engine: Answers requests; it need not be started before `ready` says so.
        tokenizer: The served model's.
        model_id: The id that clients see; they may also say `default`.
        created: When the model was loaded, Unix seconds.
        num_slots: Answers that the engine makes at once; None if that is not known, then API keys without a
            limit of their own have none.
        api_keys: Who may use it; None lets everybody in.
        status: What `/mesh/status` answers; must be fit for JSON.
        ready: Whether requests can be answered yet; until then they get 503.
        is_whole: Whether they can be answered at once, or wait until a lost stage is replaced.
        refusal: Why none are answered for now, if somebody knows: what they get then.
        now_s: Unix seconds.
        steady_s: A steady clock, in seconds, for limits per minute.
        random_bits: Random numbers of so many bits, for ids and for seeds that requests leave out.
        ping_interval_s: A stream that has been silent this long sends a comment.
        cors_origins: Of web pages that may use it; see `auth.check_origins`.
        stage_counts: Goes into the stages of `/mesh/status`: what they themselves count.
        measure_links: Answers `/mesh/links`, given round trips and bytes; None where there are no hosts.
        host_admin: Gives what answers `/mesh/drain` and `/mesh/evict`; None as long as nothing can.
        host_inspection: Gives what answers `/mesh/rehearse` and `/mesh/examine`; likewise.
        model_admin: Gives what answers `/mesh/load` and `/mesh/unload`; likewise.
        tracer: Makes a span for each request to the model; None makes none.
    """
    app = DocumentedApp(
        title="spanmesh",
        version=version("spanmesh"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
        exception_handlers={MeshError: on_mesh_error, HTTPException: on_http_exception},
        middleware=[
            Middleware(RequestLog, random_bits=random_bits),
            Middleware(Cors, origins=cors_origins, has_keys=api_keys is not None),
            Middleware(PageFiles, has_keys=api_keys is not None),
            Middleware(KeyGate, keys=api_keys, now_s=now_s, steady_s=steady_s),
            Middleware(Traced, tracer=tracer, model=model_id),
        ],
    )
    statistics = RequestStatistics()
    first = Backend(
        engine=ObservedEngine(engine, statistics, steady_s),
        tokenizer=tokenizer,
        chat_template=chat_template_of(tokenizer, now=lambda: datetime.fromtimestamp(now_s()).astimezone()),
        model_id=model_id,
        num_slots=num_slots,
        created=created,
        fingerprint=f"spanmesh-{version('spanmesh')}",
        status=status,
        ready=ready,
        is_whole=is_whole,
        refusal=refusal,
        now_s=now_s,
        steady_s=steady_s,
        random_bits=random_bits,
        ping_interval_s=ping_interval_s,
        stage_counts=stage_counts,
        link_runs=None if measure_links is None else LinkRuns(measure_links),
        host_admin=host_admin,
        inspection=host_inspection,
        model_admin=model_admin,
        statistics=statistics,
    )
    if api_keys is not None:
        api_keys.on_removed(first.responses.forget)
    app.state.backends = Backends(first)
    app.state.needs_key = api_keys is not None
    for endpoints in (chat_completions, completions, responses, tokenization, server_info, admin, web_ui):
        app.include_router(endpoints.router)
    return app
