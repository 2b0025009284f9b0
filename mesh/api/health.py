"""`GET /health`, open to everybody, and `GET /mesh/status`, for those with a key."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.answer_schemas import Anything, Health
from mesh.api.backend import backend_of
from mesh.api.document import answers
from mesh.api.json_response import json_response

router = APIRouter()


@router.get("/health", response_model=None, responses=answers(Health), openapi_extra={"security": []})
async def health(request: Request) -> Response:
    """200 once requests can be answered, 503 with `Retry-After` before."""
    backend_of(request).require_ready()
    return json_response({"status": "ok"})


@router.get("/mesh/status", response_model=None, responses=answers(Anything))
async def mesh_status(request: Request) -> Response:
    """Hosts, stages and counts, as `mesh status` shows them."""
    backend = backend_of(request)
    counts = [] if backend.stage_counts is None else await backend.stage_counts()
    status = dict(backend.status())
    if counts:
        status["stages"] = [{**stage, **own} for stage, own in zip(status["stages"], counts, strict=True)]
    return json_response(status)
