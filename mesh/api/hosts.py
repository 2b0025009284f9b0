"""`POST /mesh/drain` and `POST /mesh/evict`: hosts are sent away, by whoever sits at the head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.answer_schemas import Anything
from mesh.api.backends import backend_of
from mesh.api.document import answers
from mesh.api.json_response import json_response
from mesh.api.own_machine import require_own_machine
from spanmesh_proto.errors import ClusterError, InvalidRequest, JoinError

if TYPE_CHECKING:
    from mesh.api.backend import HostOrders

router = APIRouter()

_HOST: Final[dict[str, Any]] = {
    "parameters": [{"name": "host", "in": "query", "required": True, "schema": {"type": "string"}}]
}


@router.post("/mesh/drain", response_model=None, responses=answers(Anything), openapi_extra=_HOST)
async def drain(request: Request) -> Response:
    """Move a host's layers elsewhere and let it go; answers when that is done."""
    orders = _orders(request)
    try:
        return json_response(dict(await orders.drain(_name(request))))
    except JoinError as error:
        raise InvalidRequest(error.message, param="host") from None


@router.post("/mesh/evict", response_model=None, responses=answers(Anything), openapi_extra=_HOST)
async def evict(request: Request) -> Response:
    """Cut a host off at once, and replace the join token."""
    orders = _orders(request)
    try:
        return json_response(dict(await orders.evict(_name(request))))
    except JoinError as error:
        raise InvalidRequest(error.message, param="host") from None


def _orders(request: Request) -> HostOrders:
    """What carries it out. A key that opens the API from elsewhere does not open this."""
    require_own_machine(request, "hosts are sent away")
    departures = backend_of(request).departures()
    if departures is None:
        raise ClusterError("the mesh is still starting: try again in a moment", retry_after_s=2)
    return departures


def _name(request: Request) -> str:
    name = request.query_params.get("host", "")
    if not name:
        raise InvalidRequest("host is missing: name the host, as `mesh status` does", param="host")
    return name
