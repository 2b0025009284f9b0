"""Composition of `mesh serve`: API, head and models, until it is interrupted."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, NoReturn

import structlog

from mesh.api.app import create_app
from mesh.api.backend import ApiContext, Backends
from mesh.api.bodies import shared_body_pool
from mesh.api.http_server import serve_api
from mesh.cluster.discovery import announced, heads_found
from mesh.metrics.tracing import closing, open_tracer
from mesh.serve.address_watch import address_watched
from mesh.serve.allocations import HostAllocations
from mesh.serve.api_models import ApiModelRegistry
from mesh.serve.deployment import ModelDeployment
from mesh.serve.head import Head, open_head
from mesh.serve.head_failover import head_state, kill_unrecorded_actors
from mesh.serve.head_identity import open_identity, starting_identity
from mesh.serve.head_state import open_head_state
from mesh.serve.host_draining import HostDraining, pipelines_of
from mesh.serve.host_inspection import Inspection
from mesh.serve.model_coordinator import open_parts
from mesh.serve.model_registry import ModelRegistry
from mesh.serve.on_demand.library import Library
from mesh.serve.on_demand.loader import OnDemandLoader
from mesh.serve.on_demand.policy import DemandRules
from mesh.serve.on_demand.room import RoomCheck
from mesh.serve.options import fitted_to
from mesh.serve.served_model import backend_of, opened_model
from mesh.serve.startup_message import print_join_line, print_served
from mesh.serve.status import HeadParts, MeshState, link_runs_of
from mesh.serve.vision.hosting import EncoderHosting, hosted_encoder
from mesh.text.text_service import worker_bytes
from mesh.util.tasks import first_of
from spanmesh_proto.errors import ClusterError
from stages.gguf import model_name
from stages.weights.virtual_stages import StageCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.options.host import HeadOptions
    from mesh.serve.head_state import HeadStateWriter
    from mesh.serve.model_coordinator import CoordinatorParts
    from mesh.serve.preflight import Preflight
    from mesh.serve.served_model import ServedModel
    from mesh.util.tasks import Interruption

log = structlog.get_logger()


class _Mesh:
    """All models on one head.

    Args:
        options: Options of `mesh serve`, before they were fitted to its model.
        first: The model that `mesh serve` was started with.
        head: The open head.
        cache: Stage files of this host.
        api_models: Models of the API besides the first.
        state_writer: State of the former head, and of this one.
        parts: What the first model's coordinator works with.
    """

    def __init__(
        self,
        options: HeadOptions,
        first: ServedModel,
        head: Head,
        cache: StageCache,
        api_models: ApiModelRegistry,
        *,
        state_writer: HeadStateWriter,
        parts: CoordinatorParts,
    ) -> None:
        former = state_writer.former
        saved = () if former is None else former.models
        if head.former is not None:
            kill_unrecorded_actors(head.driver, head.former)
        self._first = first
        self._head = head
        self._state_writer = state_writer
        self._encoder: EncoderHosting | None = None
        allocations = HostAllocations(head.is_own, worker_bytes=worker_bytes())
        host_draining = HostDraining(
            head.members,
            head.service,
            lambda: pipelines_of((first, *self.models)),
            on_new_token=self._announce_token,
            clock_s=time.monotonic,
            until_written=state_writer.written,
        )
        self.models = ModelRegistry(
            first,
            head,
            cache,
            allocations,
            host_draining,
            term=state_writer.term,
            api_models=api_models,
            former=saved,
            can_adopt=head.former is not None,
            until_written=state_writer.written,
        )
        self._hosting = hosted_encoder(first, head, cache, allocations, host_draining, term=state_writer.term)
        # Opens the first of all allocations: the first model's precede those of models loaded later.
        self._deployment = ModelDeployment(
            first,
            head,
            cache,
            allocations,
            host_draining,
            parts=parts,
            former=head.former,
            term=state_writer.term,
            before_planning=self._before_planning,
        )
        self._on_demand = _on_demand(options, first, head, allocations, self.models)
        first.state.head = HeadParts(
            members=head.members,
            survey=head.survey,
            allocations=allocations,
            inspection=Inspection(
                head.driver,
                head.members,
                lambda: (pipeline for model in (first, *self.models) for pipeline in model.pipelines),
            ),
            host_draining=host_draining,
            models=self.models,
            state_writer=state_writer,
            on_demand=self._on_demand,
            drafter_admin=parts.tuning,
        )
        if parts.tuning is not None:
            parts.tuning.watch(lambda: any(model.engine.num_requests for model in self.models))

    async def run(self, on_served: Callable[[], None]) -> None:
        """Run until cancelled, or until the first model or Ray ends.

        Args:
            on_served: Called when the first model answers.

        Raises:
            MeshError: Any error of the first model's deployment, or if Ray ended.
        """
        async with self._hosting as self._encoder:
            await self._run(on_served)

    async def _run(self, on_served: Callable[[], None]) -> None:
        def on_first_served() -> None:
            on_served()
            if self._encoder is not None:
                self._encoder.begin()

        await first_of(
            self._deployment.run(on_first_served),
            self.models.run(),
            self._state_writer.keep_written(
                lambda: head_state(
                    self._head,
                    self._first,
                    self.models.saved,
                    self._state_writer.term,
                    undecided=self._deployment.former,
                )
            ),
            _watch_ray(self._head),
            *(() if self._on_demand is None else (self._on_demand.run(),)),
        )

    async def _before_planning(self) -> None:
        await self.models.settled()
        if self._encoder is not None:
            await self._encoder.decided()

    def _announce_token(self) -> None:
        print_join_line(self._head)
        self._head.write_token(self._head.token)


async def serve_mesh(options: HeadOptions, known: Preflight, interruption: Interruption) -> None:
    """Serve until interrupted. However it ends, no process that it started is left.

    Args:
        options: Options of the command line.
        known: Results of the checks before the start.
        interruption: Signal handler that cancels this.

    Raises:
        MeshError: If the model cannot be served; the message gives the reason and the remedy.
    """
    fitted = fitted_to(options, known.model)
    async with opened_model(model_name(options.model), fitted, known) as first:
        await _serve_mesh(options, first, interruption)


async def _serve_mesh(given: HeadOptions, first: ServedModel, interruption: Interruption) -> None:
    """Serve a model until interrupted.

    Args:
        given: Options of the command line.
        first: The model, with its options fitted to it.
        interruption: See `serve_mesh`.
    """
    options, known = first.options, first.known
    cache = StageCache()
    tracer = open_tracer()
    backends = Backends(backend_of(first, _api_context(first.state)))
    await backends.first.texts.check(backends.first.now())
    shared_body_pool().start()
    # What is there by now stays, and need not be looked through each time that garbage is collected.
    gc.collect()
    gc.freeze()
    app = create_app(backends, api_keys=known.api_keys, cors_origins=options.cors_origins, tracer=tracer)
    with (
        closing(tracer),
        # An identity that is refused is no reason to load a draft model.
        open_identity(options.identity_path) as identity_file,
        open_parts(options, known) as parts,
        open_head_state(options, identity_file) as state_writer,
    ):
        former = state_writer.former
        identity = starting_identity(
            identity_file,
            None if former is None else former.identity,
            term=state_writer.term,
            now_s=time.time(),
            token_lifetime_s=options.token_hours * 3600,
        )
        async with (
            serve_api(app, options.host, options.port, is_insecure=options.insecure) as url,
            open_head(options, known.facts, cache, interruption, identity=identity, former=former) as head,
            announced(heads_found(options.name, head.service.token), is_wanted=options.discoverable),
        ):
            mesh = _Mesh(
                given,
                first,
                head,
                cache,
                ApiModelRegistry(backends),
                state_writer=state_writer,
                parts=parts,
            )

            def on_served() -> None:
                mesh.models.first_serves()
                print_served(options, first.state, url, head)

            with address_watched(head, options):
                await mesh.run(on_served)


def _on_demand(
    options: HeadOptions,
    first: ServedModel,
    head: Head,
    allocations: HostAllocations,
    models: ModelRegistry,
) -> OnDemandLoader | None:
    """Loader of models that requests name; None without a library."""
    if not options.library:
        return None
    return OnDemandLoader(
        models,
        Library(options.library, time.monotonic),
        RoomCheck(first, head, allocations),
        options,
        first_name=first.name,
        rules=DemandRules(options.min_stay_s, options.idle_unload_s),
        clock_s=time.monotonic,
    )


def _api_context(state: MeshState) -> ApiContext:
    """Hooks into the mesh for the API; without effect until the head is open.

    Models are loaded only once the first one is served; hosts may be sent away before.
    """

    def served_head() -> HeadParts | None:
        return state.head if state.is_serving else None

    return ApiContext(
        link_runs=link_runs_of(state),
        host_admin=lambda: None if state.head is None else state.head.host_draining,
        inspection=lambda: None if state.head is None else state.head.inspection,
        model_admin=lambda: None if (head := served_head()) is None else head.models,
        on_demand=lambda: None if (head := served_head()) is None else head.on_demand,
        drafter_admin=lambda: None if (head := served_head()) is None else head.drafter_admin,
    )


async def _watch_ray(head: Head) -> NoReturn:
    await head.node.ended()
    raise ClusterError("the head's Ray node ended; see what else runs on this host and start again")
