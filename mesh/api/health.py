"""`GET /health`, open to everybody, and `GET /mesh/status`, for those with a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.answer_schemas import Anything, Health
from mesh.api.backends import backend_of, backends_of
from mesh.api.document import answers
from mesh.api.json_response import json_response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.api.backend import Backend

# Of a model's status; what is left out is of the mesh, or for `/metrics`.
_OF_MODEL: Final = (
    *("model", "phase", "ready", "lost", "plan", "stages", "sessions", "tokens", "repairs", "failures"),
)

router = APIRouter()


@router.get("/health", response_model=None, responses=answers(Health), openapi_extra={"security": []})
async def health(request: Request) -> Response:
    """200 once requests can be answered, 503 with `Retry-After` before."""
    backend_of(request).require_ready()
    return json_response({"status": "ok"})


@router.get("/mesh/status", response_model=None, responses=answers(Anything))
async def mesh_status(request: Request) -> Response:
    """Hosts, stages and counts, as `mesh status` shows them: of the first model, and `models` of each."""
    # Some may go while the others are asked.
    found = [(backend.model_id, await whole_status(backend)) for backend in backends_of(request)]
    return json_response({**found[0][1], "models": [_of_model(name, status) for name, status in found]})


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


def _of_model(name: str, status: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, **{field: status[field] for field in _OF_MODEL if field in status}}
