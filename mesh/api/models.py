"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.answer_schemas import ModelCard, ModelList
from mesh.api.backend import backend_of
from mesh.api.document import answers
from mesh.api.json_response import json_response

if TYPE_CHECKING:
    from mesh.api.backend import Backend

router = APIRouter()


@router.get("/v1/models", response_model=None, responses=answers(ModelList))
async def list_models(request: Request) -> Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [_model(backend_of(request))]})


@router.get("/v1/models/{model_id:path}", response_model=None, responses=answers(ModelCard, 404))
async def get_model(request: Request, model_id: str) -> Response:
    """The model by its id, which may hold slashes, or by `default`."""
    backend = backend_of(request)
    backend.require_model(model_id)
    return json_response(_model(backend))


def _model(backend: Backend) -> dict[str, Any]:
    return {
        "id": backend.model_id,
        "object": "model",
        "created": backend.created,
        "owned_by": "spanmesh",
        "max_model_len": backend.engine.context_length,
        "meta": {"n_vocab": backend.tokenizer.n_vocab, "n_ctx_train": backend.tokenizer.n_ctx_train},
    }
