"""`GET /metrics` for Prometheus, and `GET /metrics/targets`, by which it finds them; for those with a key."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response

from mesh.api.backends import backend_of, backends_of
from mesh.api.document import answers_text, answers_with
from mesh.api.health import whole_status
from mesh.api.json_response import json_response
from mesh.metrics.prometheus import ModelFigures, exposition, targets

router = APIRouter()


@router.get("/metrics", response_model=None, responses=answers_text("What Prometheus scrapes."))
async def metrics(request: Request) -> Response:
    """Counts and times since the server started."""
    models = [
        ModelFigures(backend.model_id, backend.statistics, await whole_status(backend))
        for backend in backends_of(request)
    ]
    body, content_type = exposition(models, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


@router.get("/metrics/targets", response_model=None, responses=answers_with({"type": "array"}))
async def metrics_targets(request: Request) -> Response:
    """Where to scrape, as Prometheus' HTTP service discovery wants it: here, by the name that was asked."""
    backend = backend_of(request)
    return json_response(targets(request.headers.get("host", ""), request.url.scheme, backend.model_id))
