"""Model registry: models loaded and unloaded beside the first, and restored after a head failover."""

from __future__ import annotations

import asyncio
import contextvars
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import structlog

from mesh.serve.deployment import ModelDeployment
from mesh.serve.embeddings.deployment import embedding_deployment
from mesh.serve.embeddings.model import EmbeddingModel, check_embedding_model, new_embedding_model
from mesh.serve.head_failover import end_ring, saved_model
from mesh.serve.head_state import SavedModel
from mesh.serve.model_coordinator import open_parts
from mesh.serve.served_model import checked_load, drained, opened_model
from mesh.serve.vision.hosting import hosted_encoder
from mesh.util.tasks import entered_in_thread
from spanmesh_proto.errors import (
    ClusterError,
    InvalidRequest,
    MeshError,
    ModelDoesNotFit,
    ModelNotFound,
    StageFailed,
)
from stages.cancellable_work import CancellableWork

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from mesh.options.model import LoadRequest
    from mesh.serve.allocations import HostAllocations
    from mesh.serve.api_models import ApiModelRegistry
    from mesh.serve.head import Head
    from mesh.serve.host_draining import HostDraining
    from mesh.serve.served_model import ServedModel
    from stages.weights.virtual_stages import StageCache

_RETRY_AFTER_S: Final = 2
# A restored model that finds no room is tried again when hosts change, or after this time.
_TRY_AGAIN_S: Final = 10.0

log = structlog.get_logger()


@dataclass(frozen=True)
class RegisteredModel:
    """A model of the registry at one moment."""

    name: str
    """Its name for clients."""
    phase: Literal["loading", "loaded", "unloading"]
    """Whether it answers."""
    is_evictable: bool
    """Whether it may be unloaded without an operator."""


@dataclass(eq=False)
class _Slot:
    """One model of the registry."""

    load_request: LoadRequest
    """Options of the model."""
    is_restored: bool = False
    """Whether a former head had loaded it."""
    former: SavedModel | None = None
    """Its ring of the former head, if it may be taken over; none of it is left after an attempt."""
    model: ServedModel | EmbeddingModel | None = None
    """The model, once its file was checked."""
    task: asyncio.Task[None] | None = None
    """Task that deploys and supervises it."""
    settled: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Resolved once it answers; fails with the error if it does not."""
    has_decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is known whether its former stages are taken over."""
    is_noted: bool = False
    """Whether the next head is to load it again."""
    is_serving: bool = False
    """Whether it answers."""
    is_ending: bool = False
    """Whether it is being unloaded."""
    is_cancelled: bool = False
    """Whether the task was told to end."""

    async def end(self) -> None:
        """Cancel its task, and return when nothing of the model is left.

        Only the first call cancels: another would cut short the cleanup that the first one began.
        """
        if self.task is None:
            return
        if not self.is_cancelled:
            self.is_cancelled = True
            self.task.cancel()
        await asyncio.wait([self.task])

    @property
    def saved(self) -> SavedModel:
        """Record of the model for the next head: while it is taken over, the ring of the former one."""
        if self.former is not None and not self.has_decided.is_set():
            return self.former
        if self.model is not None:
            return saved_model(self.model)
        return SavedModel(self.load_request.model_dump(mode="json"), setup="")

    @property
    def registered(self) -> RegisteredModel:
        """The model for those who decide what is loaded."""
        phase: Literal["loading", "loaded", "unloading"] = "loaded" if self.is_serving else "loading"
        name = self.load_request.served_name
        return RegisteredModel(name, "unloading" if self.is_ending else phase, self.load_request.evictable)


class ModelRegistry:
    """Models beside the first. A failure of one of them does not affect the others.

    Args:
        first: The model that `mesh serve` was started with.
        head: The open head.
        cache: Stage files of this host.
        allocations: Allocations of all models.
        host_draining: Hosts that are to leave.
        term: Term of this head.
        api_models: Models of the API.
        former: Models that a former head had loaded.
        can_adopt: Whether their stages may still run.
        until_written: Returns once the head state is durable; see `HeadStateWriter.written`.
    """

    def __init__(
        self,
        first: ServedModel,
        head: Head,
        cache: StageCache,
        allocations: HostAllocations,
        host_draining: HostDraining,
        *,
        term: int,
        api_models: ApiModelRegistry,
        former: Sequence[SavedModel] = (),
        can_adopt: bool = False,
        until_written: Callable[[], Awaitable[None]],
    ) -> None:
        self._first = first
        self._head = head
        self._cache = cache
        self._allocations = allocations
        self._host_draining = host_draining
        self._term = term
        self._api_models = api_models
        self._former = former
        self._can_adopt = can_adopt
        self._until_written = until_written
        self._slots: dict[str, _Slot] = {}
        self._first_serves = asyncio.Event()
        self._are_restored = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    def __iter__(self) -> Iterator[ServedModel | EmbeddingModel]:
        """Models whose file was checked, in the order of loading."""
        return iter([slot.model for slot in tuple(self._slots.values()) if slot.model is not None])

    @property
    def saved(self) -> tuple[SavedModel, ...]:
        """Models that a next head is to load again, in the order of loading."""
        return tuple(slot.saved for slot in self._slots.values() if slot.is_noted)

    @property
    def registered(self) -> list[RegisteredModel]:
        """All models, in the order of loading, those that are loading included."""
        return [slot.registered for slot in self._slots.values()]

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call a function whenever `registered` has changed."""
        self._listeners.append(listener)

    def first_serves(self) -> None:
        """Allow further models: the first one answers."""
        self._first_serves.set()

    async def run(self) -> NoReturn:
        """Restore the models of a former head, then run until cancelled, which stops every model."""
        try:
            for saved in self._former:
                self._restore(saved)
            self._are_restored.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.gather(*(slot.end() for slot in self._slots.values()))
        raise StageFailed("the models ended unexpectedly")

    async def settled(self) -> None:
        """Wait until it is known which former models are taken over: their stages hold memory."""
        await self._are_restored.wait()
        for slot in list(self._slots.values()):
            if slot.is_restored:
                await slot.has_decided.wait()

    async def load(self, load_request: LoadRequest) -> dict[str, Any]:
        """Serve a model beside the others; returns when it answers and the head state names it.

        Args:
            load_request: Options of the model.

        Returns:
            Its stages, JSON-serialisable.

        Raises:
            InvalidRequest: If its name is taken or invalid.
            ClusterError: If the first model is still loading, if hosts fail meanwhile, or if it answers and
                the head state cannot be written.
            ModelDoesNotFit: With the memory that is needed and that each host has left.
            ModelError: If the file is no model, or cannot be cut as requested.
        """
        if not self._first_serves.is_set():
            raise ClusterError(
                "the first model is still loading: try again in a moment", retry_after_s=_RETRY_AFTER_S
            )
        slot = self._begin(_Slot(load_request))
        # Loading continues when the client disconnects.
        await asyncio.shield(slot.settled)
        await self._until_written()
        assert slot.model is not None  # noqa: S101 - it answers
        return _description(slot.model)

    def describe(self, name: str) -> dict[str, Any]:
        """Stages of a model, as `load` returns them.

        Args:
            name: Model name for clients.

        Raises:
            ModelNotFound: If there is no such model, or it does not answer yet.
        """
        slot = self._slots.get(name)
        if slot is None or slot.model is None or not slot.is_serving:
            raise ModelNotFound(f"the model {name!r} is not loaded", param="model")
        return _description(slot.model)

    async def unload(self, name: str, wait_s: float) -> dict[str, Any]:
        """Stop serving a model: new requests are refused at once, running ones have some time to end.

        Returns when the head state is durable: a crash of the head does not restore the model.

        Args:
            name: Model name for clients.
            wait_s: Time for running requests, in seconds.

        Returns:
            Number of requests that were ended; JSON-serialisable.

        Raises:
            InvalidRequest: If it is the first model.
            ModelNotFound: If there is no such model.
            ClusterError: If it is unloaded, but the head state cannot be written.
        """
        if name == self._first.name:
            raise InvalidRequest(
                f"{name} is the model of `mesh serve`, which ends with it: press Ctrl-C there",
                param="model",
            )
        slot = self._slots.get(name)
        if slot is None or slot.task is None:
            others = ", ".join(self._slots) or "none"
            raise ModelNotFound(f"no model was loaded as {name!r}; loaded are: {others}", param="model")
        log.info("model_unloads", model=name, wait_s=wait_s)
        slot.is_noted = False
        slot.is_ending = True
        self._api_models.remove(name)
        self._changed()
        num_ended = 0 if slot.model is None else await _drained(slot.model, wait_s)
        await slot.end()
        await self._until_written()
        return {"model": name, "unloaded": True, "ended": num_ended}

    def _begin(self, slot: _Slot) -> _Slot:
        name = slot.load_request.served_name
        if name == self._first.name or name in self._slots:
            raise InvalidRequest(
                f"a model is served as {name!r} already: choose another --name", param="name"
            )
        self._slots[name] = slot
        # The task outlives the request that started it and does not inherit that request's log fields.
        slot.task = asyncio.create_task(self._serve(name, slot), context=contextvars.Context())
        self._changed()
        return slot

    def _restore(self, saved: SavedModel) -> None:
        if saved.load_request.evictable and not self._can_adopt:
            # A request that names it will load it.
            return
        slot = _Slot(saved.load_request, is_restored=True, former=saved if self._can_adopt else None)
        try:
            self._begin(slot)
        except MeshError as error:
            log.warning("model_not_restored", model=saved.order.get("model"), reason=error.message)
            self._end(slot.former)
        else:
            slot.is_noted = True

    async def _serve(self, name: str, slot: _Slot) -> None:
        """Serve a model from the check of its file to the end of its last stage."""
        try:
            while True:
                try:
                    await self._serve_until_it_fails(name, slot)
                except (ModelDoesNotFit, ClusterError) as error:
                    if not slot.is_restored or slot.load_request.evictable:
                        raise
                    log.warning("model_waits", model=name, reason=error.message)
                    await self._head.members.change_within(_TRY_AGAIN_S)
        except asyncio.CancelledError:
            _fail(slot, ClusterError(f"{name} was unloaded before it was ready"))
            raise
        except MeshError as error:
            log.warning("model_failed", model=name, reason=error.message)
            _fail(slot, error)
        except Exception as error:
            log.exception("model_failed", model=name)
            _fail(slot, StageFailed(f"loading {name} failed: {error!r}"))
        finally:
            del self._slots[name]
            log.info("model_ended", model=name)
            self._changed()

    async def _serve_until_it_fails(self, name: str, slot: _Slot) -> None:
        try:
            await self._serve_once(name, slot)
        finally:
            # The attempt may have failed before it came to the stages of the former head.
            slot.has_decided.set()
            former, slot.former = slot.former, None
            self._end(former)

    async def _serve_once(self, name: str, slot: _Slot) -> None:
        """Deploy and supervise it until that fails."""
        load_request = slot.load_request
        if load_request.embeddings:
            await self._serve_embeddings(name, slot)
            return
        taken_bytes = self._allocations.held_bytes(self._head.own)
        options, known = await checked_load(load_request, self._first, taken_bytes=taken_bytes)
        async with (
            opened_model(
                name, options, known, load_request=load_request, transfers=self._first.state.transfers
            ) as model,
            entered_in_thread(open_parts(options, known)) as parts,
            hosted_encoder(
                model, self._head, self._cache, self._allocations, self._host_draining, term=self._term
            ) as encoder,
        ):
            slot.model = model

            async def before_planning() -> None:
                await self._turn(slot)
                await encoder.decided()

            def on_served() -> None:
                self._on_served(slot)
                encoder.begin()

            try:
                await self._api_models.add(model)
                deployment = ModelDeployment(
                    model,
                    self._head,
                    self._cache,
                    self._allocations,
                    self._host_draining,
                    parts=parts,
                    former=slot.former,
                    term=self._term,
                    before_planning=before_planning,
                )
                await deployment.run(on_served)
            finally:
                slot.is_serving = False
                self._api_models.remove(name)
                self._changed()

    async def _serve_embeddings(self, name: str, slot: _Slot) -> None:
        """Deploy and supervise an embedding model until that fails."""
        load_request = slot.load_request
        known = await CancellableWork().run(lambda: check_embedding_model(load_request))
        slot.model = model = new_embedding_model(name, load_request, known, self._first.state.transfers)
        deployment = embedding_deployment(
            model,
            self._head,
            self._cache,
            self._allocations,
            self._host_draining,
            former=slot.former,
            term=self._term,
            before_planning=lambda: self._turn(slot),
        )
        try:
            self._api_models.add_embeddings(model.backend(time.time()))
            await deployment.run(lambda: self._on_served(slot))
        finally:
            slot.is_serving = False
            self._api_models.remove(name)
            self._changed()

    async def _turn(self, slot: _Slot) -> None:
        """Wait for the first model, which has precedence; nothing can be taken over."""
        slot.has_decided.set()
        await self._first_serves.wait()

    def _on_served(self, slot: _Slot) -> None:
        slot.is_noted = slot.is_serving = True
        slot.has_decided.set()
        if not slot.settled.done():
            slot.settled.set_result(None)
        log.info("model_serves", model=slot.load_request.served_name)
        self._changed()

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    def _end(self, former: SavedModel | None) -> None:
        """End the stages of a former head's model that are not taken over."""
        if former is not None:
            end_ring(self._head.driver, former)


def _description(model: ServedModel | EmbeddingModel) -> dict[str, Any]:
    """Stages of a model that answers, JSON-serialisable."""
    return {
        "model": model.name,
        "plan": model.state.plan_reason,
        "context": _context_text(model),
        "stages": [
            {
                "host": handle.member.name,
                "layers": str(handle.config.layers),
                "threads": handle.config.options.num_threads,
                "bytes": handle.config.memory.total_bytes,
            }
            for handle in model.pipeline.handles
        ],
    }


async def _drained(model: ServedModel | EmbeddingModel, wait_s: float) -> int:
    """Wait for running requests of a model to end, then refuse all others; returns how many were ended."""
    if isinstance(model, EmbeddingModel):
        return await model.drained(wait_s)
    return await drained(model, wait_s)


def _context_text(model: ServedModel | EmbeddingModel) -> str | None:
    """Choice of the context; None where it was given, or there is none."""
    context = None if isinstance(model, EmbeddingModel) else model.state.context
    return None if context is None else str(context)


def _fail(slot: _Slot, error: MeshError) -> None:
    if not slot.settled.done():
        slot.settled.set_exception(error)
        # The client that waited may have disconnected.
        slot.settled.exception()
