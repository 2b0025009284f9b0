"""Served model: its options, engine, state and pipeline; and the draining of its requests."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from mesh.api.backend import Backend
from mesh.coordinator.coordinator import PendingEngine
from mesh.serve.head_state import setup_of
from mesh.serve.options import fitted_to, options_of_load
from mesh.serve.pictures import open_pictures
from mesh.serve.pipeline import Pipeline
from mesh.serve.preflight import check_model
from mesh.serve.stage_factory import Transfers
from mesh.serve.status import MeshState, stage_counts
from spanmesh_proto.errors import ModelNotFound, StageFailed
from stages.cancellable_work import CancellableWork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mesh.api.backend import ApiContext
    from mesh.options.host import HeadOptions
    from mesh.options.model import LoadRequest
    from mesh.serve.pictures import ServedPictures
    from mesh.serve.preflight import Preflight

_POLL_S: Final = 0.1

log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One model, from the check of its file to the end of its last stage."""

    name: str
    """Model name for clients."""
    options: HeadOptions
    """Options, fitted to the model."""
    known: Preflight
    """Results of the checks before the start."""
    engine: PendingEngine
    """Engine of the API; answers once the ring is connected."""
    state: MeshState
    """State for `/mesh/status`."""
    pipeline: Pipeline
    """Stages and replicas."""
    setup: str
    """Fingerprint of all settings that its stages are loaded with."""
    load_request: LoadRequest | None = None
    """Request of `mesh load`; None for the model that `mesh serve` was started with."""
    pictures: ServedPictures | None = None
    """How it reads pictures; None for text only."""

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """All that it has on hosts: its stages, and its encoder of pictures."""
        return (self.pipeline, *(() if self.pictures is None else (self.pictures.pipeline,)))


async def checked_load(
    load_request: LoadRequest, first: ServedModel, *, taken_bytes: int = 0
) -> tuple[HeadOptions, Preflight]:
    """Options of a model that is to be loaded beside the first, fitted to it, and the results of its checks.

    In a thread, since other models answer meanwhile.

    Args:
        load_request: Request for the model.
        first: The model that `mesh serve` was started with.
        taken_bytes: See `check_model`, whose errors it raises.

    Raises:
        InvalidRequest: If options contradict one another.
    """
    options, facts = options_of_load(load_request, first.options), first.known.facts
    known = await CancellableWork().run(lambda: check_model(options, lambda: facts, taken_bytes=taken_bytes))
    return fitted_to(options, known.model), known


def new_model(
    name: str,
    options: HeadOptions,
    known: Preflight,
    *,
    pictures: ServedPictures | None = None,
    load_request: LoadRequest | None = None,
    transfers: Transfers | None = None,
) -> ServedModel:
    """A model before any of its stages runs.

    Args:
        name: Model name for clients.
        options: Options, fitted to the model.
        known: Results of the checks before the start.
        pictures: How it reads pictures; None for text only.
        load_request: Request of `mesh load`, if there was one.
        transfers: Record of weights sent to hosts; new unless given.
    """
    engine, pipeline = PendingEngine(known.workload.ctx_size), Pipeline()
    state = MeshState(
        known.model,
        engine,
        pipeline,
        numeric_mode="exact" if options.exact else "fast",
        speculation_mode=options.speculate,
        num_checkpoints=0 if known.model.can_trim else options.checkpoints,
        transfers=transfers or Transfers(),
        describe_pictures=None if pictures is None else pictures.describe,
    )
    setup = setup_of(options, known)
    return ServedModel(name, options, known, engine, state, pipeline, setup, load_request, pictures)


@asynccontextmanager
async def opened_model(
    name: str,
    options: HeadOptions,
    known: Preflight,
    *,
    load_request: LoadRequest | None = None,
    transfers: Transfers | None = None,
) -> AsyncIterator[ServedModel]:
    """`new_model`, while its projector's process runs if it reads pictures; errors of `open_pictures`."""
    async with open_pictures(options, known) as (pictures, whole):
        yield new_model(
            name, options, whole, pictures=pictures, load_request=load_request, transfers=transfers
        )


def backend_of(model: ServedModel, api: ApiContext) -> Backend:
    """Backend of the API for a model.

    Args:
        model: Its engine may not answer yet.
        api: Shared by all models of the server.
    """
    engine = model.engine
    return Backend(
        api=api,
        engine=engine,
        tokenizer=model.known.tokenizer,
        model_id=model.name,
        created=int(api.now_s()),
        status=model.state.status,
        ready=lambda: model.state.is_serving,
        is_whole=lambda: engine.is_ready,
        refusal=lambda: engine.refusal,
        num_slots=model.known.workload.num_slots,
        pictures=None if model.pictures is None else model.pictures.pictures,
        records=model.options.record_path is not None,
        stage_counts=lambda: stage_counts(engine),
    )


async def drained(model: ServedModel, wait_s: float) -> int:
    """Wait for running requests to end, then refuse all others.

    Args:
        model: Already removed from the API.
        wait_s: Longest wait, in seconds.

    Returns:
        Number of requests that were ended.
    """
    name, engine = model.name, model.engine
    coordinator = engine.coordinator
    if coordinator is None:
        return 0
    deadline_s = time.monotonic() + wait_s
    while (num_left := coordinator.num_requests) and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    if num_left:
        log.warning("requests_ended", model=name, requests=num_left, after_s=wait_s)
    # Requests may have found the model just before it was removed.
    engine.ended = ModelNotFound(f"the model `{name}` was unloaded", param="model")
    coordinator.give_up(StageFailed(f"the model {name} was unloaded"))
    return num_left
