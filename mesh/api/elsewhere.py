"""Endpoints that OpenAI has and a mesh has not: they say so, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastapi import APIRouter

from mesh.api.document import refuses
from spanmesh_proto.errors import NotSupported

if TYPE_CHECKING:
    from starlette.responses import Response

router = APIRouter()

_EMBEDDINGS: Final = (
    "embeddings are not made here: the last stage turns hidden states into tokens and sends nothing else, and"
    " those of a chat model make poor embeddings: ask a server of an embedding model"
)


@router.post("/v1/embeddings", response_model=None, responses=refuses(501))
async def embeddings() -> Response:
    """501, with the reason."""
    raise NotSupported(_EMBEDDINGS)
