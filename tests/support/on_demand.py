"""Models on demand behind the real API: the real loader, over models that are loaded without stages."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh.options.host import HeadOptions
from mesh.serve.model_registry import RegisteredModel
from mesh.serve.on_demand.library import Library, LibraryEntry
from mesh.serve.on_demand.loader import OnDemandLoader
from mesh.serve.on_demand.policy import DemandRules
from mesh.status import LoadingStatus, MeshStatus, ModelDescription, StageStatus
from spanmesh_proto.errors import ClusterError, InvalidRequest, ModelDoesNotFit, ModelNotFound
from stages.slicing.model_facts import ModelSummary
from tests.support.api_harness import MODEL, ScriptedEngine, backend_of, running_api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping

    from mesh.api.api_keys import ApiKeys
    from mesh.api.backend import Backends
    from mesh.options.model import LoadRequest
    from mesh.text.tokenizer import Tokenizer
    from spanmesh_proto.errors import MeshError
    from tests.support.api_harness import Api

# Beside the first model there is room for one of these, and for two where one is the smallest.
SIZES = {"large": 6, "middle": 5, "small": 1, "whale": 99}
SUMMARY = ModelSummary(n_vocab=49152, n_ctx_train=8192, file_bytes=10**9)
FREE = 6


@dataclass
class Clock:
    """Stands still unless it is told."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FixedLibrary(Library):
    """What files would be found."""

    def __init__(self, names: Collection[str], clock: Clock) -> None:
        super().__init__((), clock)
        self._replaced: dict[str, LibraryEntry] = {}
        self.entries = {
            name: LibraryEntry(name, Path(f"/library/{name}.gguf"), 1_700_000_000, SUMMARY)
            for name in sorted(names)
        }

    async def refresh(self, *, max_age_s: float = 0.0) -> None:
        """Take note of files that were replaced: there is nothing to search."""
        self.entries = {**self.entries, **self._replaced}

    def replace(self, name: str) -> None:
        """Replace a file, which the next search finds."""
        self._replaced[name] = replace(self.entries[name], created_s=self.entries[name].created_s + 1)


class LoadedModels:
    """Loads and unloads as `ModelRegistry` does, but what is loaded is an engine with a script.

    Attributes:
        backends: Models of the API.
        engines: By model; each says one token unless it is given before.
        errors: What loading fails with, by model.
        orders: What was loaded and unloaded, in order.
        may_finish: Loading takes until this is set.
    """

    def __init__(self, backends: Backends, tokenizer: Tokenizer) -> None:
        self.backends = backends
        self.engines: dict[str, ScriptedEngine] = {}
        self.errors: dict[str, MeshError] = {}
        self.orders: list[str] = []
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self._tokenizer = tokenizer
        self._listeners: list[Callable[[], None]] = []
        self._models: dict[str, RegisteredModel] = {}
        self._stopped: dict[str, asyncio.Event] = {}

    @property
    def registered(self) -> list[RegisteredModel]:
        return list(self._models.values())

    @property
    def loaded(self) -> set[str]:
        return {name for name, model in self._models.items() if model.phase == "loaded"}

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def poke(self) -> None:
        """Something has changed: a clock, for example."""
        for listener in self._listeners:
            listener()

    async def load(self, load_request: LoadRequest) -> Mapping[str, Any]:
        name = load_request.served_name
        if name in self._models:
            raise InvalidRequest(f"a model is served as {name!r} already", param="name")
        self.orders.append(f"load {name}")
        self._models[name] = RegisteredModel(name, "loading", load_request.evictable)
        self.backends.add(self._backend(name))
        self.poke()
        stopped = self._stopped[name] = asyncio.Event()
        finished = [asyncio.ensure_future(each.wait()) for each in (self.may_finish, stopped)]
        await asyncio.wait(finished, return_when=asyncio.FIRST_COMPLETED)
        for each in finished:
            each.cancel()
        if stopped.is_set():
            raise ClusterError(f"{name} was unloaded before it was ready")
        error = self.errors.get(name)
        if error is not None:
            self.backends.remove(name)
            del self._models[name]
            self.poke()
            raise error
        self._models[name] = replace(self._models[name], phase="loaded")
        self.poke()
        return self.describe(name)

    async def unload(self, name: str, wait_s: float) -> Mapping[str, Any]:
        if name not in self._models:
            raise ModelNotFound(f"no model was loaded as {name!r}", param="model")
        self.orders.append(f"unload {name}")
        num_ended = self.engines[name].num_running
        self._models[name] = replace(self._models[name], phase="unloading")
        self.backends.remove(name)
        self.poke()
        await asyncio.sleep(wait_s if num_ended else 0)
        del self._models[name]
        self._stopped[name].set()
        self.poke()
        return {"model": name, "unloaded": True, "ended": num_ended}

    def describe(self, name: str) -> Mapping[str, Any]:
        if name not in self.loaded:
            raise ModelNotFound(f"the model {name!r} is not loaded", param="model")
        stage = {"host": "attic", "layers": "[0, 6)", "threads": 1, "bytes": 2**30 * SIZES.get(name, 1)}
        return {"model": name, "plan": "attic can hold the whole model", "stages": [stage]}

    def _backend(self, name: str) -> Any:
        engine = self.engines.setdefault(name, ScriptedEngine([(400,)]))

        def status() -> MeshStatus:
            is_loaded = name in self.loaded
            coming = LoadingStatus(
                host="attic",
                layers=(0, 6),
                bytes=2**30,
                step="fetching",
                share=0.25,
                fetched_bytes=2**28,
                fetch_bytes=2**30,
            )
            stage = StageStatus(host="attic", layers=(0, 6), address="127.0.0.1:1")
            return MeshStatus(
                phase="serving" if is_loaded else "loading",
                ready=is_loaded,
                plan="attic can hold the whole model",
                model=ModelDescription(name=name, context=engine.context_length, layers=6),
                loading=() if is_loaded else (coming,),
                stages=(stage,) if is_loaded else (),
            )

        return backend_of(
            engine,
            self._tokenizer,
            api=self.backends.first.api,
            model_id=name,
            status=status,
            ready=lambda: name in self.loaded,
        )


class Memory:
    """Room of one host, in whole numbers.

    Args:
        models: What is loaded, or loading.
    """

    def __init__(self, models: LoadedModels) -> None:
        self._models = models
        self.free = FREE
        self.broken: dict[str, MeshError] = {}

    def layout(self) -> object:
        return (self.free, tuple(self._models.registered))

    async def shortage(self, load_request: LoadRequest, gone: Collection[str]) -> MeshError | None:
        await asyncio.sleep(0)
        name = load_request.served_name
        if name in self.broken:
            raise self.broken[name]
        left = self.free - sum(
            SIZES[model.name] for model in self._models.registered if model.name not in gone
        )
        if SIZES[name] <= left:
            return None
        return ModelDoesNotFit(f"{name} does not fit: it needs {SIZES[name]} GiB; free are {left} GiB")


@dataclass
class Hook:
    """What the API finds once the server runs."""

    loader: OnDemandLoader | None = None
    models: LoadedModels | None = None


@dataclass
class OnDemandApi:
    """A running server with a library."""

    api: Api
    """The server."""
    models: LoadedModels
    """What is loaded."""
    memory: Memory
    """What fits."""
    clock: Clock
    """The loader's clock."""
    loader: OnDemandLoader
    """The loader."""
    library: FixedLibrary
    """What it may load."""
    hook: Hook
    """What the API finds."""

    def hide_library(self, *, is_hidden: bool) -> None:
        """Have the API find no library, as before the first model of a new head answers."""
        self.hook.loader = None if is_hidden else self.loader

    def later(self, seconds: float) -> None:
        """Let time pass, for the loader."""
        self.clock.now_s += seconds
        self.models.poke()


def head_options(**changes: Any) -> HeadOptions:
    """Options of a `mesh serve` on this machine."""
    given: dict[str, Any] = {
        "model": Path(f"/library/{MODEL}.gguf"),
        "name": "attic",
        "address": "127.0.0.1",
        "token_hours": 1.0,
        "threads": 1,
    }
    return HeadOptions(**{**given, **changes})


@asynccontextmanager
async def on_demand_api(
    tokenizer: Tokenizer,
    *,
    first: ScriptedEngine | None = None,
    keys: ApiKeys | None = None,
    rules: DemandRules | None = None,
    load_wait_s: float = 30.0,
    max_waiting: int = 64,
    status: Callable[[], MeshStatus] = lambda: MeshStatus(ready=True, phase="serving"),
    **hosts: Any,
) -> AsyncIterator[OnDemandApi]:
    """Serve the first model, and the library of `SIZES` on demand; `hosts` are arguments of `running_api`."""
    hook, clock = Hook(), Clock()
    async with running_api(
        first or ScriptedEngine([(300,)]),
        tokenizer,
        keys=keys,
        status=status,
        on_demand=lambda: hook.loader,
        model_admin=lambda: hook.models,
        **hosts,
    ) as api:
        assert api.backends is not None
        models = hook.models = LoadedModels(api.backends, tokenizer)
        memory, library = Memory(models), FixedLibrary(SIZES, clock)
        loader = hook.loader = OnDemandLoader(
            models,
            library,
            memory,
            head_options(library=(Path("/library"),), load_wait_s=load_wait_s, max_waiting=max_waiting),
            first_name=MODEL,
            rules=rules or DemandRules(),
            clock_s=clock,
        )
        running = asyncio.create_task(loader.run())
        try:
            yield OnDemandApi(api, models, memory, clock, loader, library, hook)
            assert not running.done(), running.exception()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
