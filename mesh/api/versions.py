"""`GET /version`: what runs here."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import APIRouter

from mesh.api.answer_schemas import Versions
from mesh.api.document import answers
from mesh.api.json_response import json_response
from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION

if TYPE_CHECKING:
    from starlette.responses import Response

router = APIRouter()


@router.get("/version", response_model=None, responses=answers(Versions))
async def versions() -> Response:
    """Ours as vLLM tells its own, and those of what decides how a model computes and who may join."""
    return json_response(
        {
            "version": SOFTWARE_VERSION,
            "protocol_version": PROTOCOL_VERSION,
            "llama_cpp_python": version("llama-cpp-python"),
        }
    )
