"""`POST /mesh/links`: measures the links between all hosts, for those with a key.

It sends over every link, to every host: so a few small probes are for any key, and what would take bandwidth
from the stages, many probes or data in bulk, is for the head's own machine. One run at a time is made, for as
long as its client waits for it.
"""

from __future__ import annotations

from typing import Any, Final

import structlog
from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response

from mesh.api.answer_schemas import Anything
from mesh.api.backends import backend_of
from mesh.api.document import answers
from mesh.api.hang_up import ClientGoneError, unless_hung_up
from mesh.api.json_response import json_response
from mesh.api.own_machine import require_own_machine
from mesh.api.request_log import CLIENT_GONE_STATUS
from spanmesh_proto.errors import ClusterError, InvalidRequest

log = structlog.get_logger()

router = APIRouter()

MAX_PROBES: Final = 1000
MAX_PROBES_OF_ANY_KEY: Final = 50
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
    backend = backend_of(request)
    runs = backend.link_runs
    if runs is None:
        raise ClusterError("there are no hosts here whose links could be measured")
    probes = _number(request, "probes", _PROBES, 1, MAX_PROBES)
    bulk_bytes = _number(request, "bulk_bytes", 0, 0, MAX_BULK_BYTES)
    if bulk_bytes:
        require_own_machine(request, "bandwidths are measured (bulk_bytes)")
    if probes > MAX_PROBES_OF_ANY_KEY:
        require_own_machine(request, f"more than {MAX_PROBES_OF_ANY_KEY} probes are sent")
    try:
        found = await unless_hung_up(runs.run(probes, bulk_bytes), request.receive, backend.closing)
    except ClientGoneError:
        log.info("client_gone")
        return Response(status_code=CLIENT_GONE_STATUS)
    return json_response(dict(found))


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isdecimal() and len(text) <= _MAX_DIGITS and least <= int(text) <= most):
        raise InvalidRequest(
            f"{name} is {text[:_MAX_DIGITS]!r}; it must be a number from {least} to {most}", param=name
        )
    return int(text)
