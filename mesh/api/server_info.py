"""Endpoints about the server: models, versions, health, status and metrics."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response

from mesh.api.auth import is_own_machine, may_load
from mesh.api.backend import backend_of, backends_of
from mesh.api.errors import json_response
from mesh.api.openapi import (
    Anything,
    Health,
    ModelCard,
    ModelList,
    Versions,
    answers,
    answers_text,
    answers_with,
)
from mesh.metrics.prometheus import EmbeddingFigures, ModelFigures, exposition, targets
from mesh.status import ChatModelStatus, LibraryStatus, MeshStatus, RightsStatus, TokenCounts, as_json, copied
from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto.errors import ClusterError, MeshError

if TYPE_CHECKING:
    from mesh.api.backend import Backend
    from mesh.api.head_services import LibraryModel, OnDemandModels
    from mesh.embedding.registry import EmbeddingBackend
    from mesh.text.tokenizer import Tokenizer
    from stages.slicing.model_facts import ModelSummary

router = APIRouter()


@router.get("/v1/models", response_model=None, responses=answers(ModelList))
async def list_models(request: Request) -> Response:
    """Every model that is served, the first one first, then those of the library that a request would load.

    With the fields of OpenAI's and Anthropic's lists.
    """
    backends = backends_of(request)
    on_demand = backends.first.api.on_demand()
    library = [] if on_demand is None else await on_demand.models()
    served = {backend.model_id: _model(backend) for backend in backends}
    served |= {backend.model_id: _embedding_model(backend) for backend in backends.embeddings}
    others = [_library_model(model) for model in library if model.name not in served]
    models = [*served.values(), *others]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
    return json_response({"object": "list", "data": models, **ends})


@router.get("/v1/models/{model_id:path}", response_model=None, responses=answers(ModelCard, 404))
async def get_model(request: Request, model_id: str) -> Response:
    """A model by its id, which may hold slashes, or the first by `default`; one of the library, too."""
    backends = backends_of(request)
    embedding = backends.embeddings.find(model_id)
    if embedding is not None:
        return json_response(_embedding_model(embedding))
    backend, on_demand = backends.find(model_id), backends.first.api.on_demand()
    known = None if backend is not None or on_demand is None else await on_demand.find(model_id)
    if known is not None:
        return json_response(_library_model(known))
    return json_response(_model(backends.named(model_id)))


def _model(backend: Backend) -> dict[str, Any]:
    card = _card(
        backend.model_id,
        backend.created,
        backend.engine.context_length,
        backend.tokenizer,
        phase="loaded" if backend.ready() else "loading",
    )
    card |= _modalities(reads_pictures=backend.pictures is not None)
    told = backend.texts.told_format
    return card if told is None else {**card, "answer_format": told.format.shown()}


def _modalities(*, reads_pictures: bool) -> dict[str, Any]:
    """What a model reads and writes, as llama-server tells it."""
    return {
        "capabilities": ["completion", *(["multimodal"] if reads_pictures else [])],
        "architecture": {
            "input_modalities": ["text", *(["image"] if reads_pictures else [])],
            "output_modalities": ["text"],
        },
    }


def _embedding_model(backend: EmbeddingBackend) -> dict[str, Any]:
    return _card(
        backend.model_id,
        backend.created,
        backend.longest,
        backend.tokenizer,
        kind="embeddings",
        phase="loaded",
        n_embd=backend.width,
    )


def _library_model(model: LibraryModel) -> dict[str, Any]:
    return _card(
        model.name,
        model.created,
        model.context_length,
        model.summary,
        phase=model.phase,
        size=model.size_bytes,
    ) | _modalities(reads_pictures=model.projector is not None)


def _card(
    name: str,
    created: int,
    context_length: int,
    facts: Tokenizer | ModelSummary,
    *,
    kind: Literal["chat", "embeddings"] = "chat",
    phase: str,
    **more: int,
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "kind": kind,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "created": created,
        "owned_by": "spanmesh",
        "max_model_len": context_length,
        "meta": {"n_vocab": facts.n_vocab, "n_ctx_train": facts.n_ctx_train, **more},
        "loaded": phase == "loaded",
        # As llama.cpp's router has it.
        "status": {"value": phase},
    }


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


@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=None, responses=answers(Health), openapi_extra={"security": []})
async def health(request: Request) -> Response:
    """200 once requests can be answered, 503 with `Retry-After` before.

    Reasons name hosts, layers and sizes: where keys are needed `/mesh/status` has them, for those with a key.
    """
    try:
        backend_of(request).require_ready()
    except MeshError as error:
        if request.app.state.api_keys is None:
            raise
        raise ClusterError(
            "requests cannot be answered for now: `/mesh/status` has the reason, for those with an API key",
            retry_after_s=error.retry_after_s,
        ) from None
    return json_response({"status": "ok"})


@router.get("/mesh/status", response_model=None, responses=answers(Anything))
async def mesh_status(request: Request) -> Response:
    """Hosts, stages and counts, as `mesh status` shows them: of the first model, and `models` of each."""
    backends = backends_of(request)
    # Models may be unloaded during the loop.
    found = [(backend.model_id, await whole_status(backend)) for backend in backends]
    # Of the others the mesh tells less; more is in `/metrics`.
    models = [copied(ChatModelStatus, status, name=name, kind="chat") for name, status in found]
    embeddings = [backend.status() for backend in backends.embeddings]
    on_demand = backends.first.api.on_demand()
    status = replace(
        found[0][1],
        models=(*models, *embeddings),
        library=None if on_demand is None else await _library(on_demand),
        rights=RightsStatus(
            load=may_load(request) or is_own_machine(request), unload=is_own_machine(request)
        ),
    )
    return json_response(as_json(status))


async def _library(on_demand: OnDemandModels) -> tuple[LibraryStatus, ...]:
    return tuple(
        copied(LibraryStatus, model, context=model.context_length)
        for model in await on_demand.models(is_glance=True)
    )


async def whole_status(backend: Backend) -> MeshStatus:
    """The status with the stages' counters, where they answer, and token counts since the start."""
    counts = [] if backend.stage_counts is None else await backend.stage_counts()
    status = backend.status()
    # A recovery may have come between the two queries.
    if counts and len(counts) == len(status.stages):
        stages = zip(status.stages, counts, strict=True)
        status = replace(status, stages=tuple(replace(stage, **asdict(own)) for stage, own in stages))
    tokens = TokenCounts(
        prompt=backend.statistics.num_prompt_tokens, generated=backend.statistics.num_generated_tokens
    )
    return replace(status, tokens=tokens)


@router.get("/metrics", response_model=None, responses=answers_text("Metrics in the Prometheus text format."))
async def metrics(request: Request) -> Response:
    """Counts and times since the server started."""
    backends = backends_of(request)
    models = [
        ModelFigures(backend.model_id, backend.statistics, await whole_status(backend))
        for backend in backends
    ]
    embedding_models = [
        EmbeddingFigures(backend.model_id, backend.embedder.statistics, backend.status())
        for backend in backends.embeddings
    ]
    body, content_type = exposition(models, request.headers.get("accept", ""), embedding_models)
    return Response(body, headers={"Content-Type": content_type})


@router.get("/metrics/targets", response_model=None, responses=answers_with({"type": "array"}))
async def metrics_targets(request: Request) -> Response:
    """Scrape target for Prometheus' HTTP service discovery: this server, by the name that was asked."""
    backend = backend_of(request)
    return json_response(targets(request.headers.get("host", ""), request.url.scheme, backend.model_id))
