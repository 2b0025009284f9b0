"""`GET /health`, open to everybody, and `GET /mesh/status`, for those with a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.answer_schemas import Anything, Health
from mesh.api.backend import backend_of
from mesh.api.document import answers
from mesh.api.json_response import json_response

if TYPE_CHECKING:
    from mesh.api.backend import Backend

router = APIRouter()


@router.get("/health", response_model=None, responses=answers(Health), openapi_extra={"security": []})
async def health(request: Request) -> Response:
    """200 once requests can be answered, 503 with `Retry-After` before."""
    backend_of(request).require_ready()
    return json_response({"status": "ok"})


@router.get("/mesh/status", response_model=None, responses=answers(Anything))
async def mesh_status(request: Request) -> Response:
    """Hosts, stages and counts, as `mesh status` shows them."""
    return json_response(await whole_status(backend_of(request)))


async def whole_status(backend: Backend) -> dict[str, Any]:
    """The status, with what the stages themselves count where they answer, and tokens since the start."""
    counts = [] if backend.stage_counts is None else await backend.stage_counts()
    status = dict(backend.status())
    # A repair may have come between the two questions.
    if counts and len(counts) == len(status.get("stages", ())):
        status["stages"] = [{**stage, **own} for stage, own in zip(status["stages"], counts, strict=True)]
    status["tokens"] = {
        "prompt": backend.statistics.num_prompt_tokens,
        "generated": backend.statistics.num_generated_tokens,
    }
    return status
