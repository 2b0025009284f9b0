"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.answer_schemas import ModelCard, ModelList
from mesh.api.backends import backends_of
from mesh.api.document import answers
from mesh.api.json_response import json_response

if TYPE_CHECKING:
    from mesh.api.backend import Backend

router = APIRouter()


@router.get("/v1/models", response_model=None, responses=answers(ModelList))
async def list_models(request: Request) -> Response:
    """Every model that is served, the first one first."""
    return json_response({"object": "list", "data": [_model(backend) for backend in backends_of(request)]})


@router.get("/v1/models/{model_id:path}", response_model=None, responses=answers(ModelCard, 404))
async def get_model(request: Request, model_id: str) -> Response:
    """A model by its id, which may hold slashes, or the first by `default`."""
    return json_response(_model(backends_of(request).named(model_id)))


def _model(backend: Backend) -> dict[str, Any]:
    return {
        "id": backend.model_id,
        "object": "model",
        "created": backend.created,
        "owned_by": "spanmesh",
        "max_model_len": backend.engine.context_length,
        "meta": {"n_vocab": backend.tokenizer.n_vocab, "n_ctx_train": backend.tokenizer.n_ctx_train},
    }
