"""`POST /mesh/links`: measures the links between all hosts, for those with a key."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.answer_schemas import Anything
from mesh.api.backends import backend_of
from mesh.api.document import answers
from mesh.api.json_response import json_response
from spanmesh_proto.errors import ClusterError, InvalidRequest

router = APIRouter()

MAX_PROBES: Final = 1000
MAX_BULK_BYTES: Final = 256 * 2**20
_PROBES: Final = 20
_MAX_DIGITS: Final = 18


def _parameter(name: str, least: int, most: int) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": "integer", "minimum": least, "maximum": most}}


@router.post(
    "/mesh/links",
    response_model=None,
    responses=answers(Anything),
    openapi_extra={
        "parameters": [_parameter("probes", 1, MAX_PROBES), _parameter("bulk_bytes", 0, MAX_BULK_BYTES)]
    },
)
async def measure_links(request: Request) -> Response:
    """Round trips, and bandwidth if `bulk_bytes` are to be sent, as `mesh bench net` shows them."""
    measure = backend_of(request).measure_links
    if measure is None:
        raise ClusterError("there are no hosts here whose links could be measured")
    probes = _number(request, "probes", _PROBES, 1, MAX_PROBES)
    bulk_bytes = _number(request, "bulk_bytes", 0, 0, MAX_BULK_BYTES)
    return json_response(dict(await measure(probes, bulk_bytes)))


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isdecimal() and len(text) <= _MAX_DIGITS and least <= int(text) <= most):
        raise InvalidRequest(
            f"{name} is {text[:_MAX_DIGITS]!r}; it must be a number from {least} to {most}", param=name
        )
    return int(text)
