"""Loader of models on demand: requests that wait for a model, and the steps that give each its turn."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Protocol

import structlog

from mesh.api.head_services import LibraryModel
from mesh.serve.on_demand.library import load_request_of
from mesh.serve.on_demand.policy import (
    AskRoom,
    Load,
    ModelDemand,
    Refuse,
    Rest,
    Unload,
    next_step,
)
from mesh.serve.options import ctx_size_for
from mesh.util.fair_queue import FairQueue
from spanmesh_proto.errors import (
    ClusterError,
    MeshError,
    ModelDoesNotFit,
    ModelError,
    Overloaded,
    StageFailed,
    Unauthorized,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from mesh.options.host import HeadOptions
    from mesh.options.model import LoadRequest
    from mesh.serve.model_registry import RegisteredModel
    from mesh.serve.on_demand.library import Library, LibraryEntry
    from mesh.serve.on_demand.policy import DemandRules, Step

# A model that loads is asked for again soon; one that waits for others, when their stay is over.
_LOADING_RETRY_S: Final = 10
_WAITING_RETRY_S: Final = 30
# After a failure: hosts may join, or an operator may unload something.
_RETRY_S: Final = 60
# Hosts that join or leave are noticed within this time while requests wait.
_LOOK_AGAIN_S: Final = 5.0
# Age of the latest search of the library that is good enough for a status.
_GLANCE_S: Final = 30.0
# After an unexpected error.
_PAUSE_S: Final = 1.0

log = structlog.get_logger()


class Registry(Protocol):
    """Models beside the first; see `mesh.serve.model_registry.ModelRegistry`."""

    @property
    def registered(self) -> Sequence[RegisteredModel]:
        """All models, those that are loading included."""

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call a function whenever `registered` has changed."""

    async def load(self, load_request: LoadRequest) -> Mapping[str, Any]:
        """Serve a model beside the others; returns when it answers."""

    async def unload(self, name: str, wait_s: float) -> Mapping[str, Any]:
        """Serve a model no more; returns when its memory is free."""

    def describe(self, name: str) -> Mapping[str, Any]:
        """Stages of a model that answers."""


class Room(Protocol):
    """Memory of the hosts; see `mesh.serve.on_demand.room.RoomCheck`."""

    def layout(self) -> object:
        """State that answers depend on."""

    async def shortage(self, load_request: LoadRequest, gone: Collection[str]) -> MeshError | None:
        """Reason why a model does not fit once others are unloaded; None if it fits."""


@dataclass(eq=False)
class _WaitingRequest:
    """A request that waits for a model."""

    arrived: asyncio.Future[None]
    """Resolved once the model answers; fails with the error if it does not."""
    since_s: float
    """Its arrival, in seconds of the clock."""
    client: str | None
    """Identity of its API key; None where the API is open."""
    refusal: MeshError | None
    """Its error if it may only wait while the model loads for others; None if it may have it done."""


@dataclass(eq=False)
class _Use:
    """Requests for one model."""

    waiting: FairQueue[str | None, _WaitingRequest]
    """Requests that wait for it to be loaded."""
    num_held: int = 0
    """Requests that use it, those that wait for it included."""
    loaded_at_s: float | None = None
    """When it was loaded; None if it is not."""
    used_at_s: float = 0.0
    """When the latest request ended, or it was loaded."""

    @property
    def waiting_since_s(self) -> float | None:
        """Arrival of the oldest waiting request that may have the model loaded; None if there is none."""
        return min((each.since_s for each in self.waiting if each.refusal is None), default=None)


@dataclass(frozen=True)
class _Failure:
    """Failed loading: not tried again for a while, since others would be unloaded for it again."""

    error: MeshError
    """What its requests are told."""
    until_s: float
    """When it may be tried again."""
    entry: LibraryEntry | None
    """The file; another one in its place is tried at once. None if there was none."""


class OnDemandLoader:
    """Loads models for requests that name them, instead of models that idle. For one event loop.

    Args:
        registry: Loads and unloads.
        library: Models that may be loaded.
        room: Whether a model fits.
        options: Options of `mesh serve`.
        first_name: Name of the model of `mesh serve`, which always stays.
        rules: Times that loaded models are kept.
        clock_s: Monotonic, seconds.
    """

    def __init__(
        self,
        registry: Registry,
        library: Library,
        room: Room,
        options: HeadOptions,
        *,
        first_name: str,
        rules: DemandRules,
        clock_s: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._library = library
        self._room = room
        self._options = options
        self._first_name = first_name
        self._rules = rules
        self._clock_s = clock_s
        self._uses: dict[str, _Use] = {}
        self._failures: dict[str, _Failure] = {}
        self._leaving: frozenset[str] = frozenset()
        # Models that were unloaded while they were loaded here.
        self._stopped: set[str] = set()
        self._answers: dict[tuple[str, frozenset[str]], MeshError | None] = {}
        self._layout: object = None
        self._changed = asyncio.Event()
        registry.on_change(self._note_registry)

    # The API's side

    async def models(self, *, is_glance: bool = False) -> list[LibraryModel]:
        """All models of the library, by name, but for the one that `mesh serve` was started with.

        Args:
            is_glance: Whether files may be missing that are new: for those who look every second.
        """
        if is_glance:
            await self._library.refresh(max_age_s=_GLANCE_S)
        else:
            await self._library.refresh()
        return [self._described(entry) for entry in self._library.entries.values() if self._is_offered(entry)]

    async def find(self, name: str) -> LibraryModel | None:
        """The model of the library that has this name; a new file is found, and one instead of a bad one."""
        if name not in self._library.entries or name in self._failures:
            await self._library.refresh()
        entry = self._library.entries.get(name)
        return None if entry is None or not self._is_offered(entry) else self._described(entry)

    def answers(self, name: str) -> bool:
        """Whether a model answers that no order and no other model is about to unload."""
        return name not in self._leaving and self._phase(name) == "loaded"

    def lease(self, name: str, client: str | None, *, refusal: MeshError | None = None) -> Lease:
        """Begin the use of a model, which is not unloaded for others until the lease is released.

        See `mesh.api.backend.OnDemandModels`.
        """
        return Lease(self, name, client, refusal)

    def forget(self, clients: Collection[str]) -> None:
        """End the requests of removed keys that wait; see `mesh.api.backend.OnDemandModels`."""
        for name, use in self._uses.items():
            for waiting in [each for each in use.waiting if each.client in clients]:
                use.waiting.discard(waiting.client, waiting)
                _settle(waiting, Unauthorized(f"the API key was removed before `{name}` was loaded"))
        self._changed.set()

    def describe(self, name: str) -> Mapping[str, Any]:
        """Stages of a model that answers, JSON-serialisable."""
        return self._registry.describe(name)

    def hold(self, name: str) -> None:
        """Count one more request that uses a model."""
        self._use(name).num_held += 1

    def release(self, name: str) -> None:
        """Count one request less."""
        use = self._use(name)
        use.num_held -= 1
        use.used_at_s = self._clock_s()
        if not use.num_held and use.loaded_at_s is None:
            del self._uses[name]
        self._changed.set()

    async def loaded(
        self, name: str, client: str | None, refusal: MeshError | None, *, is_bounded: bool
    ) -> None:
        """Return once a held model answers; see `mesh.api.backend.ModelLease`, whose errors it raises.

        Args:
            name: Name of the model.
            client: Identity of the API key; None where the API is open.
            refusal: Error for a request that may not have the model loaded; None if it may.
            is_bounded: Whether the wait has a limit.
        """
        if self.answers(name):
            return
        if refusal is not None and self._phase(name) != "loading":
            raise refusal
        self._refuse_known_failure(name)
        use = self._use(name)
        if not use.waiting.has_room(client):
            own = "" if client is None else f", {use.waiting.num_of(client)} of them with this API key"
            raise Overloaded(
                f"{len(use.waiting)} requests wait for the model `{name}` to be loaded{own}: try again in"
                f" {self._retry_after_s(name)} s, or serve with a larger --max-waiting",
                retry_after_s=self._retry_after_s(name),
            )
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = _WaitingRequest(arrived, self._clock_s(), client, refusal)
        use.waiting.add(client, waiting)
        self._changed.set()
        try:
            async with asyncio.timeout(self._options.load_wait_s if is_bounded else None):
                await arrived
        except TimeoutError:
            retry_after_s = self._retry_after_s(name)
            raise ClusterError(
                f"the model `{name}` {self._reason(name)}: try again in {retry_after_s} s, or ask for a"
                " stream, which waits",
                retry_after_s=retry_after_s,
            ) from None
        finally:
            use.waiting.discard(client, waiting)
            self._changed.set()

    # The loop

    async def run(self) -> NoReturn:
        """Take one step after the other, until cancelled."""
        try:
            await self._library.refresh()
        except OSError as error:
            log.warning("library_unreadable", reason=error.strerror)
        else:
            log.info("library_read", models=len(self._library.entries))
        while True:
            self._changed.clear()
            step = self._next_step()
            try:
                await self._take(step)
            except Exception:
                # Those who wait must not wait for ever.
                log.exception("on_demand_failed", step=str(step))
                if isinstance(step, AskRoom | Load | Refuse):
                    self._fail(step.name, StageFailed(f"loading {step.name} failed: see the server's log"))
                await asyncio.sleep(_PAUSE_S)

    def _next_step(self) -> Step:
        layout = self._room.layout()
        if layout != self._layout:
            self._layout, self._answers = layout, {}

        def fits(name: str, gone: frozenset[str]) -> bool | None:
            question = (name, gone)
            return self._answers[question] is None if question in self._answers else None

        return next_step(self._demands(), self._clock_s(), self._rules, fits)

    async def _take(self, step: Step) -> None:
        match step:
            case AskRoom():
                await self._ask_room(step)
            case Load():
                await self._load(step.name)
            case Unload():
                await self._unload(step)
            case Refuse():
                self._refuse(step)
            case Rest():
                await self._rest(step)

    async def _ask_room(self, question: AskRoom) -> None:
        name, layout = question.name, self._layout
        entry = self._entry(name)
        if entry is None:
            return
        try:
            shortage = await self._room.shortage(load_request_of(entry, self._options), question.gone)
        except MeshError as error:
            self._fail(name, _for_clients(error, entry))
            return
        # Otherwise hosts or stages changed meanwhile, and it is asked again.
        if self._room.layout() == layout:
            self._answers[name, question.gone] = shortage

    async def _load(self, name: str) -> None:
        entry = self._entry(name)
        if entry is None:
            return
        log.info("model_loads_on_demand", model=name)
        self._stopped.discard(name)
        try:
            await self._registry.load(load_request_of(entry, self._options))
        except MeshError as error:
            if name in self._stopped:
                # By an order, which the next one may take back.
                self._settle(name, ClusterError(error.message, retry_after_s=_RETRY_S))
            elif self._phase(name) != "loaded":
                # Otherwise it answers, and only the head state could not be written.
                self._fail(name, _for_clients(error, entry))

    async def _unload(self, step: Unload) -> None:
        log.info("models_unload_on_demand", models=step.names, wanted_by=step.wanted_by)
        # From here on requests for them wait; none runs.
        self._leaving = frozenset(step.names)
        try:
            outcomes = await asyncio.gather(
                *(self._registry.unload(name, 0.0) for name in step.names), return_exceptions=True
            )
        finally:
            self._leaving = frozenset()
        for name, outcome in zip(step.names, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                log.warning("model_not_unloaded", model=name, reason=str(outcome))

    def _entry(self, name: str) -> LibraryEntry | None:
        """A model of the library; None, once its requests have failed, if it is gone from there."""
        entry = self._library.entries.get(name)
        if entry is None:
            self._fail(name, _lost(name))
        return entry

    def _refuse(self, step: Refuse) -> None:
        shortage, entry = self._answers[step.name, step.gone], self._library.entries.get(step.name)
        if shortage is None or entry is None:
            self._settle(step.name, _lost(step.name))
            return
        log.info("model_has_no_room", model=step.name, reason=shortage.message)
        self._settle(step.name, _for_clients(shortage, entry))

    async def _rest(self, step: Rest) -> None:
        pause_s = None if step.until_s is None else max(0.0, step.until_s - self._clock_s())
        if any(use.waiting for use in self._uses.values()):
            pause_s = _LOOK_AGAIN_S if pause_s is None else min(pause_s, _LOOK_AGAIN_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._changed.wait()

    def _demands(self) -> list[ModelDemand]:
        """All models that are registered or waited for."""
        registered = {model.name: model for model in self._registry.registered}
        demands = []
        for name in registered.keys() | self._uses.keys():
            model, use = registered.get(name), self._uses.get(name) or self._new_use()
            demands.append(
                ModelDemand(
                    name,
                    "unloaded" if model is None else model.phase,
                    is_evictable=model is None or model.is_evictable,
                    num_held=use.num_held,
                    waiting_since_s=use.waiting_since_s,
                    loaded_at_s=use.loaded_at_s or 0.0,
                    used_at_s=use.used_at_s,
                )
            )
        return demands

    def _note_registry(self) -> None:
        """Begin the stay of models that answer now, and let their requests go on at once.

        Requests that may only wait while a model loads for others fail once that ends without the model.
        """
        registered = self._registry.registered
        loaded = {model.name for model in registered if model.phase == "loaded"}
        loading = {model.name for model in registered if model.phase == "loading"}
        self._stopped |= {model.name for model in registered if model.phase == "unloading"}
        now_s = self._clock_s()
        for name in loaded:
            use = self._use(name)
            if use.loaded_at_s is None:
                use.loaded_at_s = use.used_at_s = now_s
            if name not in self._leaving:
                self._settle(name, None)
        for name, use in list(self._uses.items()):
            if name in loaded:
                continue
            use.loaded_at_s = None
            if name not in loading:
                for waiting in use.waiting:
                    if waiting.refusal is not None:
                        _settle(waiting, waiting.refusal)
            if not use.num_held:
                del self._uses[name]
        self._changed.set()

    def _settle(self, name: str, error: MeshError | None) -> None:
        """Let the requests that wait for a model go on, or fail."""
        use = self._uses.get(name)
        while use is not None and (waiting := use.waiting.next()) is not None:
            _settle(waiting, error)

    def _fail(self, name: str, error: MeshError) -> None:
        log.warning("model_not_loaded_on_demand", model=name, reason=error.message)
        entry = self._library.entries.get(name)
        self._failures[name] = _Failure(error, self._clock_s() + _RETRY_S, entry)
        self._settle(name, error)

    def _refuse_known_failure(self, name: str) -> None:
        failure = self._failures.get(name)
        if failure is None:
            return
        if self._clock_s() < failure.until_s and self._library.entries.get(name) == failure.entry:
            raise failure.error
        del self._failures[name]

    def _use(self, name: str) -> _Use:
        if name not in self._uses:
            self._uses[name] = self._new_use()
        return self._uses[name]

    def _new_use(self) -> _Use:
        return _Use(FairQueue(self._options.max_waiting))

    def _phase(self, name: str) -> Literal["unloaded", "loading", "loaded", "unloading"]:
        found = next((model.phase for model in self._registry.registered if model.name == name), None)
        return found or "unloaded"

    @property
    def reads_pictures(self) -> bool:
        """Whether any model of the library does."""
        return any(entry.projector is not None for entry in self._library.entries.values())

    def _is_offered(self, entry: LibraryEntry) -> bool:
        return entry.name != self._first_name

    def _described(self, entry: LibraryEntry) -> LibraryModel:
        phase: Literal["unloaded", "waiting", "loading", "loaded", "unloading"] = self._phase(entry.name)
        if phase == "unloaded" and (use := self._uses.get(entry.name)) is not None and use.waiting:
            phase = "waiting"
        return LibraryModel(
            name=entry.name,
            phase="unloading" if entry.name in self._leaving else phase,
            created=entry.created_s,
            context_length=ctx_size_for(self._options.ctx_size, entry.summary.n_ctx_train),
            summary=entry.summary,
            projector=None if entry.projector is None else entry.projector.name,
        )

    def _reason(self, name: str) -> str:
        if self._phase(name) == "loading":
            return "is still loading"
        return "waits for models with requests, or that were loaded a moment ago, to make room"

    def _retry_after_s(self, name: str) -> int:
        """Seconds after which the request may succeed."""
        if self._phase(name) != "unloaded":
            return _LOADING_RETRY_S
        now_s = self._clock_s()
        ends_s = [
            use.loaded_at_s + self._rules.min_stay_s - now_s
            for use in self._uses.values()
            if use.loaded_at_s is not None and not use.num_held
        ]
        return max(_LOADING_RETRY_S, math.ceil(min(ends_s, default=_WAITING_RETRY_S)) + 1)


class Lease:
    """One request's use of a model; see `mesh.api.backend.ModelLease`.

    Args:
        loader: Loads the model.
        name: Name of the model.
        client: Identity of the API key; None where the API is open.
        refusal: Error for a request that may not have the model loaded; None if it may.
    """

    def __init__(
        self, loader: OnDemandLoader, name: str, client: str | None, refusal: MeshError | None
    ) -> None:
        self._loader = loader
        self._name = name
        self._client = client
        self._refusal = refusal
        self._is_held = True
        loader.hold(name)

    async def loaded(self, *, is_bounded: bool) -> None:
        """Return once the model answers; see `mesh.api.backend.ModelLease`, whose errors it raises."""
        await self._loader.loaded(self._name, self._client, self._refusal, is_bounded=is_bounded)

    def release(self) -> None:
        """End the use; later calls have no effect."""
        if self._is_held:
            self._is_held = False
            self._loader.release(self._name)


def _settle(waiting: _WaitingRequest, error: MeshError | None) -> None:
    """Let a request go on, or fail; no effect if it does already."""
    if waiting.arrived.done():
        return
    if error is None:
        waiting.arrived.set_result(None)
    else:
        waiting.arrived.set_exception(error)
        # The client may have disconnected at this moment.
        waiting.arrived.exception()


def _lost(name: str) -> MeshError:
    return ModelError(f"the file of the model `{name}` is no longer in the library")


def _for_clients(error: MeshError, entry: LibraryEntry) -> MeshError:
    """The error without folders of the head's host; a shortage of memory is one for now."""
    message = error.message.replace(f"{entry.path.parent}/", "")
    if isinstance(error, ModelError) and not isinstance(error, ModelDoesNotFit):
        return type(error)(message)
    return ClusterError(message, retry_after_s=_RETRY_S)
