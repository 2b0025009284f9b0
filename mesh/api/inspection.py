"""`POST /mesh/rehearse` and `POST /mesh/examine`: hosts are looked into, by whoever sits at the head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.answer_schemas import Anything
from mesh.api.backends import backend_of
from mesh.api.body import read_body
from mesh.api.document import answers, takes
from mesh.api.json_response import json_response
from mesh.api.own_machine import require_own_machine
from mesh.api.rehearsal_body import RehearsalBody
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from mesh.api.backend import HostInspection

router = APIRouter()


@router.post(
    "/mesh/rehearse",
    response_model=None,
    responses=answers(Anything, 413),
    openapi_extra=takes(RehearsalBody),
)
async def rehearse(request: Request) -> Response:
    """Have hosts time stages of a model that they do not hold, with blank weights, for `mesh plan`."""
    backend, inspection = backend_of(request), _inspection(request)
    body = await read_body(
        request, RehearsalBody, backend.unknown_fields, context_length=backend.engine.context_length
    )
    wanted: dict[str, list[dict[str, Any]]] = {}
    for each in body.hosts:
        wanted.setdefault(each.host, []).extend(order.model_dump() for order in each.orders)
    return json_response({"hosts": await inspection.rehearse(wanted)})


@router.post("/mesh/examine", response_model=None, responses=answers(Anything))
async def examine(request: Request) -> Response:
    """Have every host look at itself, as `mesh doctor` shows it."""
    return json_response({"hosts": await _inspection(request).examine()})


def _inspection(request: Request) -> HostInspection:
    """What carries it out: processes start on hosts for it, so a key from elsewhere does not open this."""
    require_own_machine(request, "hosts are inspected")
    inspection = backend_of(request).inspection()
    if inspection is None:
        raise ClusterError("the mesh is still starting: try again in a moment", retry_after_s=2)
    return inspection
