"""`POST /mesh/load` and `POST /mesh/unload`: models come and go, by whoever sits at the head."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.answer_schemas import Anything
from mesh.api.backends import backends_of
from mesh.api.body import read_body
from mesh.api.document import answers, takes
from mesh.api.json_response import json_response
from mesh.api.load_body import LoadBody
from mesh.api.own_machine import require_own_machine
from spanmesh_proto.errors import ClusterError, InvalidRequest

if TYPE_CHECKING:
    from mesh.api.backend import ModelOrders

router = APIRouter()

_WAIT_S: Final = 30.0
_MOST_WAIT_S: Final = 86400.0
_UNLOAD: Final[dict[str, Any]] = {
    "parameters": [
        {"name": "model", "in": "query", "required": True, "schema": {"type": "string"}},
        {
            "name": "wait_s",
            "in": "query",
            "schema": {"type": "number", "minimum": 0, "maximum": _MOST_WAIT_S, "default": _WAIT_S},
        },
    ]
}


@router.post(
    "/mesh/load",
    response_model=None,
    responses=answers(Anything, 413),
    openapi_extra=takes(LoadBody),
)
async def load(request: Request) -> Response:
    """Serve a model beside those that are served; answers when it does, or with why it cannot."""
    orders, backends = _orders(request), backends_of(request)
    body = await read_body(request, LoadBody, backends.unknown_fields, context_length=backends.context_length)
    paths = {"model": body.model, "draft_path": body.draft_path, "replay_path": body.replay_path}
    for param, path in paths.items():
        if path is not None and not PurePath(path).is_absolute():
            raise InvalidRequest(f"{param} is {path!r}: give the whole path of the file", param=param)
    if body.stages is not None and body.split is not None:
        raise InvalidRequest("split says how many stages there are: leave out stages", param="stages")
    return json_response(dict(await orders.load(body.model_dump())))


@router.post("/mesh/unload", response_model=None, responses=answers(Anything, 404), openapi_extra=_UNLOAD)
async def unload(request: Request) -> Response:
    """Serve a model no more; answers when nothing of it is left. Requests that run have `wait_s` to end."""
    orders = _orders(request)
    name = request.query_params.get("model", "")
    if not name:
        raise InvalidRequest("model is missing: name it, as `mesh status` does", param="model")
    return json_response(dict(await orders.unload(name, _wait_s(request))))


def _orders(request: Request) -> ModelOrders:
    """What carries it out. A key that opens the API from elsewhere does not open this."""
    require_own_machine(request, "models are loaded and unloaded")
    orders = backends_of(request).first.model_orders()
    if orders is None:
        raise ClusterError("the mesh is still starting: try again in a moment", retry_after_s=2)
    return orders


def _wait_s(request: Request) -> float:
    text = request.query_params.get("wait_s", str(_WAIT_S))
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not 0 <= wait_s <= _MOST_WAIT_S:
        raise InvalidRequest(
            f"wait_s is {text[:20]!r}; it must be a number of seconds from 0 to {_MOST_WAIT_S:g}",
            param="wait_s",
        )
    return wait_s
