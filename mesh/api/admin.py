"""Endpoints for operators: drain, evict, load, unload, links, rehearse and examine."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002

from mesh.api.auth import client_of, may_load, require_own_machine
from mesh.api.backend import backend_of, backends_of, body_of
from mesh.api.errors import json_response
from mesh.api.event_stream import while_connected
from mesh.api.on_demand import lease_for
from mesh.api.openapi import Anything, answers, takes
from mesh.options.model import LoadRequest
from mesh.status import as_json
from spanmesh_proto.errors import ClusterError, InvalidRequest, JoinError

if TYPE_CHECKING:
    from mesh.api.head_services import HostAdmin, HostInspection, ModelAdmin, OnDemandModels

router = APIRouter()
_HOST: Final[dict[str, Any]] = {
    "parameters": [{"name": "host", "in": "query", "required": True, "schema": {"type": "string"}}]
}
MAX_PROBES: Final = 1000
MAX_PROBES_OF_ANY_KEY: Final = 50
MAX_BULK_BYTES: Final = 256 * 2**20
_PROBES: Final = 20
_MAX_DIGITS: Final = 18
_LOADING: Final = "models are loaded and unloaded"
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
_MOST_HOSTS: Final = 64
_MOST_PARTS: Final = 8
_MOST_DEVICES: Final = 64
# A blank stage is a sparse file, but it is loaded all the same.
_MOST_BLANK_BYTES: Final = 8 * 2**30


class BlankBody(BaseModel):
    """A stage without weights."""

    model_config = ConfigDict(extra="forbid")

    header: str = Field(description="Base64: magic, metadata and tensor directory of a GGUF.")
    num_bytes: int = Field(ge=1, le=_MOST_BLANK_BYTES, description="Size of the whole file.")


class OrderBody(BaseModel):
    """Measurement for one host; see `stages.host.profile_request`."""

    model_config = ConfigDict(extra="forbid")

    blank: BlankBody
    num_threads: int = Field(1, ge=1, le=1024)
    is_exact: bool = False
    kv_type: str = "f16"
    position: int = Field(128, ge=0, le=2**20)
    num_rounds: int = Field(20, ge=1, le=1000)
    pause_ms: float = Field(5.0, ge=0, le=1000)
    gpu_layers: list[tuple[str, int]] = Field([], max_length=_MOST_DEVICES)
    cpu_moe_layers: int = Field(0, ge=0)


class HostOrdersBody(BaseModel):
    """For one host."""

    model_config = ConfigDict(extra="forbid")

    host: str
    orders: list[OrderBody] = Field(min_length=1, max_length=_MOST_PARTS)


class RehearsalBody(BaseModel):
    """Request of `mesh plan`."""

    model_config = ConfigDict(extra="allow")

    hosts: list[HostOrdersBody] = Field(min_length=1, max_length=_MOST_HOSTS)


class DrafterBody(BaseModel):
    """What becomes of a drafter that was tuned in the background."""

    model_config = ConfigDict(extra="forbid")

    action: Literal["back"] = Field(description="`back`: serve the group with the drafter before.")


@router.post("/mesh/drain", response_model=None, responses=answers(Anything), openapi_extra=_HOST)
async def drain(request: Request) -> Response:
    """Move a host's layers elsewhere and let it go; answers when that is done."""
    host_admin = _host_admin(request)
    try:
        return json_response(dict(await host_admin.drain(_name(request))))
    except JoinError as error:
        raise InvalidRequest(error.message, param="host") from None


@router.post("/mesh/evict", response_model=None, responses=answers(Anything), openapi_extra=_HOST)
async def evict(request: Request) -> Response:
    """Disconnect a host at once and replace the join token."""
    host_admin = _host_admin(request)
    try:
        return json_response(dict(await host_admin.evict(_name(request))))
    except JoinError as error:
        raise InvalidRequest(error.message, param="host") from None


def _host_admin(request: Request) -> HostAdmin:
    """Implementation of drain and evict. A key that opens the API from other machines does not open this."""
    require_own_machine(request, "hosts are removed")
    departures = backend_of(request).api.host_admin()
    if departures is None:
        raise ClusterError("the mesh is still starting: try again in some seconds", retry_after_s=2)
    return departures


def _name(request: Request) -> str:
    name = request.query_params.get("host", "")
    if not name:
        raise InvalidRequest("host is missing: name the host, as `mesh status` does", param="host")
    return name


def _parameter(name: str, least: int, most: int) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": "integer", "minimum": least, "maximum": most}}


# A measurement sends over every link, to every host: any key may ask for a few small probes, and only the
# head's own machine for many probes or bulk data, which take bandwidth from the stages. One run at a time,
# while its client waits for it; those of different keys in turn.
@router.post(
    "/mesh/links",
    response_model=None,
    responses=answers(Anything),
    openapi_extra={
        "parameters": [
            _parameter("probes", 1, MAX_PROBES),
            _parameter("bulk_bytes", 0, MAX_BULK_BYTES),
            _parameter("ports", 0, 1),
        ]
    },
)
async def measure_links(request: Request) -> Response:
    """Round trips, bandwidth if `bulk_bytes` are to be sent, with `ports=1` closed ports of hosts' ranges."""
    backend = backend_of(request)
    runs = backend.api.link_runs
    if runs is None:
        raise ClusterError("there are no hosts here whose links could be measured")
    probes = _number(request, "probes", _PROBES, 1, MAX_PROBES)
    bulk_bytes = _number(request, "bulk_bytes", 0, 0, MAX_BULK_BYTES)
    checks_ports = bool(_number(request, "ports", 0, 0, 1))
    if bulk_bytes:
        require_own_machine(request, "bandwidths are measured (bulk_bytes)")
    if checks_ports:
        require_own_machine(request, "ports are tried (ports)")
    if probes > MAX_PROBES_OF_ANY_KEY:
        require_own_machine(request, f"more than {MAX_PROBES_OF_ANY_KEY} probes are sent")
    work = runs.run(probes, bulk_bytes, client_of(request.scope), checks_ports=checks_ports)
    return json_response(dict(await while_connected(request, work)))


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isdecimal() and len(text) <= _MAX_DIGITS and least <= int(text) <= most):
        raise InvalidRequest(
            f"{name} is {text[:_MAX_DIGITS]!r}; it must be a number from {least} to {most}", param=name
        )
    return int(text)


@router.post(
    "/mesh/load",
    response_model=None,
    responses=answers(Anything, 413),
    openapi_extra=takes(LoadRequest),
)
async def load(request: Request) -> Response:
    """Serve a model beside those that are served; answers when it does, or with why it cannot.

    A file is loaded beside all others, and stays. A model of the library, which is named without a path, may
    be loaded instead of others that idle, and goes as they do.
    """
    model_admin = _model_admin(request, is_right_enough=True)
    body = await body_of(request, LoadRequest)
    on_demand = backends_of(request).first.api.on_demand()
    if on_demand is not None and await on_demand.find(body.model) is not None:
        return await _load_from_library(request, on_demand, body)
    require_own_machine(request, _LOADING)
    paths = {"model": PurePath(body.model)} | {
        name: each for name, each in body if isinstance(each, PurePath)
    }
    for param, path in paths.items():
        if not path.is_absolute():
            what = "the whole path of the file"
            if param == "model" and on_demand is not None:
                what += ", or the name of a model of the library, as `/v1/models` lists it"
            raise InvalidRequest(f"{param} is {str(path)!r}: give {what}", param=param)
    body.require_consistent()
    return json_response(dict(await model_admin.load(body)))


async def _load_from_library(request: Request, on_demand: OnDemandModels, body: LoadRequest) -> Response:
    """Load a model as a request that names it would, and wait as long as one whose answer is not streamed."""
    if options := sorted(body.model_fields_set - {"model"}):
        raise InvalidRequest(
            f"{options[0]} is for models that are given by their path: one of the library has the options of"
            " `mesh serve`",
            param=options[0],
        )
    lease = lease_for(request.scope, on_demand, body.model)
    await while_connected(request, lease.loaded(is_bounded=True))
    return json_response(dict(on_demand.describe(body.model)))


@router.post("/mesh/unload", response_model=None, responses=answers(Anything, 404), openapi_extra=_UNLOAD)
async def unload(request: Request) -> Response:
    """Serve a model no more; answers when nothing of it is left. Requests that run have `wait_s` to end."""
    model_admin = _model_admin(request)
    name = request.query_params.get("model", "")
    if not name:
        raise InvalidRequest("model is missing: name it, as `mesh status` does", param="model")
    return json_response(dict(await model_admin.unload(name, _wait_s(request))))


def _model_admin(request: Request, *, is_right_enough: bool = False) -> ModelAdmin:
    """Implementation of load and unload. A key that opens the API from other machines does not open this.

    Args:
        request: Request of the operator.
        is_right_enough: Whether a key with the right to load models may come from other machines.
    """
    if not (is_right_enough and may_load(request)):
        require_own_machine(request, _LOADING)
    model_admin = backends_of(request).first.api.model_admin()
    if model_admin is None:
        raise ClusterError("the mesh is still starting: try again in some seconds", retry_after_s=2)
    return model_admin


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


@router.post(
    "/mesh/rehearse",
    response_model=None,
    responses=answers(Anything, 413),
    openapi_extra=takes(RehearsalBody),
)
async def rehearse(request: Request) -> Response:
    """Have hosts time stages of a model that they do not hold, with blank weights, for `mesh plan`."""
    inspection = _inspection(request)
    body = await body_of(request, RehearsalBody)
    wanted: dict[str, list[dict[str, Any]]] = {}
    for each in body.hosts:
        wanted.setdefault(each.host, []).extend(order.model_dump() for order in each.orders)
    return json_response({"hosts": await inspection.rehearse(wanted)})


@router.post("/mesh/examine", response_model=None, responses=answers(Anything))
async def examine(request: Request) -> Response:
    """Have every host look at itself, as `mesh doctor` shows it."""
    return json_response({"hosts": await _inspection(request).examine()})


def _inspection(request: Request) -> HostInspection:
    """Implementation of rehearse and examine, which start processes: only for the head's own machine."""
    require_own_machine(request, "hosts are inspected")
    inspection = backend_of(request).api.inspection()
    if inspection is None:
        raise ClusterError("the mesh is still starting: try again in some seconds", retry_after_s=2)
    return inspection


@router.post(
    "/mesh/drafter",
    response_model=None,
    responses=answers(Anything, 413),
    openapi_extra=takes(DrafterBody),
)
async def change_drafter(request: Request) -> Response:
    """Serve the group that is tuned for with the drafter before, and erase the one of now."""
    require_own_machine(request, "drafters are changed")
    await body_of(request, DrafterBody)
    drafters = backend_of(request).api.drafter_admin()
    if drafters is None:
        raise InvalidRequest(
            "no drafter is tuned here: `mesh serve` does so for a group of API keys that it is given"
        )
    return json_response(as_json(await drafters.go_back()))
