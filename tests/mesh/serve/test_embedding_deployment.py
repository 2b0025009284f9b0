"""Embedding models beside others, in one process: loaded, lost, moved, taken over, unloaded; no Ray."""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from mesh.api.backend import ApiContext, Backends
from mesh.cluster.admission import Admissions
from mesh.cluster.certificates import Authority, make_certificate
from mesh.cluster.join_token import JoinToken
from mesh.cluster.members import Member, Members
from mesh.options.model import LoadRequest
from mesh.serve.allocations import HostAllocations
from mesh.serve.api_models import ApiModelRegistry
from mesh.serve.embeddings.model import EmbeddingModel, check_embedding_model
from mesh.serve.head_failover import head_state
from mesh.serve.host_draining import HostDraining
from mesh.serve.model_registry import ModelRegistry
from mesh.serve.pipeline import Pipeline
from mesh.serve.stage_factory import Transfers
from mesh.serve.stage_handle import StageHandle
from mesh.status import RepairStatus
from spanmesh_proto.errors import ClusterError, InvalidModel, InvalidRequest, ModelDoesNotFit, StageFailed
from stages.embedding.runtime import EmbeddingRuntime
from stages.gguf import part_paths
from stages.weights.fetch import FetchSource
from stages.weights.virtual_stages import StageCache
from tests.support import api_harness
from tests.support.api_harness import MODEL, ScriptedEngine, backend_of
from tests.support.linked_parts import linked_parts
from tests.support.serve_harness import InProcessDriver, Messages, host, written_at_once
from tests.support.tiny_embedders import TinyEmbedder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from mesh.cluster.membership_server import MembershipService
    from mesh.embedding.registry import EmbeddingBackend
    from mesh.serve.head import Head
    from mesh.serve.head_state import SavedModel
    from mesh.serve.served_model import ServedModel
    from mesh.text.tokenizer import Tokenizer
    from tests.support.serve_harness import InProcessActor

pytestmark = pytest.mark.model
tokenizer = api_harness.tokenizer

TEXTS = ((5, 6, 7), (8, 9), (10,) * 60)


class NamedDriver(InProcessDriver):
    """Finds processes by their names, as Ray does, also for the next head."""

    def __init__(self) -> None:
        super().__init__()
        self._actors: dict[str, InProcessActor] = {}

    async def create(
        self, kind: type, *arguments: Any, ray_node_name: str, name: str = "", **more: Any
    ) -> InProcessActor:
        actor = await super().create(kind, *arguments, ray_node_name=ray_node_name, **more)
        self._actors[name] = actor
        return actor

    @property
    def actors(self) -> list[InProcessActor]:
        """All that were created."""
        return list(self._actors.values())

    def find(self, name: str) -> InProcessActor:
        actor = self._actors.get(name)
        if actor is None or actor.is_dead:
            raise StageFailed(f"the process {name} has ended")
        return actor


class Announcements(Messages):
    admissions: Any = Admissions(JoinToken(("127.0.0.1:1",), "", b"", 0))

    def announce_to_all(self, state: str) -> None:
        self.said.announced.append(state)


@dataclass
class Hosts:
    """What outlives a head."""

    members: Members
    driver: NamedDriver
    authority: Authority
    cache: StageCache

    def join(self, name: str, memory_bytes: int) -> None:
        self.members.admit(host(name, memory_bytes))


@dataclass
class Serving:
    """A head, and the models beside the first."""

    hosts: Hosts
    head: Any
    registry: ModelRegistry
    backends: Backends
    messages: Announcements
    allocations: HostAllocations
    host_draining: HostDraining

    def model(self, name: str = "tiny") -> EmbeddingModel:
        (model,) = (each for each in self.registry if each.name == name)
        assert isinstance(model, EmbeddingModel)
        return model

    def backend(self, name: str = "tiny") -> EmbeddingBackend:
        backend = self.backends.embeddings.find(name)
        assert backend is not None
        return backend

    def is_served(self, name: str = "tiny") -> bool:
        backend = self.backends.embeddings.find(name)
        return backend is not None and backend.embedder.is_serving

    def where(self, name: str = "tiny") -> list[str]:
        return [handle.member.name for handle in self.model(name).pipeline.handles]

    def held_bytes(self) -> dict[str, int]:
        return {member.name: self.allocations.held_bytes(member) for member in self.hosts.members}

    async def embed(self, name: str = "tiny") -> NDArray[np.float32]:
        backend = self.backend(name)
        backend.require_ready()
        return await backend.embedder.embed(TEXTS)

    async def end_process(self) -> None:
        """As abruptly as a process ends; returns when its port is closed."""
        (handle,) = self.model().pipeline.handles
        self.hosts.driver.kill(handle._actor)
        await self.hosts.driver.close()

    def saved(self) -> tuple[SavedModel, ...]:
        """Models that the next head is to load again."""
        first = SimpleNamespace(setup="", pipeline=Pipeline())
        return head_state(self.head, cast("ServedModel", first), self.registry.saved, 7).models


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(
    hosts: Hosts, tokenizer: Tokenizer, *, former: Sequence[SavedModel] = (), term: int = 7
) -> AsyncIterator[Serving]:
    messages = Announcements(hosts.members)
    head = SimpleNamespace(
        driver=hosts.driver,
        authority=hosts.authority,
        members=hosts.members,
        service=messages,
        source_for=lambda _member: FetchSource("127.0.0.1:1", b"", ""),
        own=SimpleNamespace(name="none of them", address="127.0.0.1"),
        # All are this host, so that all read the model itself.
        is_own=lambda _member: True,
        node=SimpleNamespace(record=None),
        certificate=SimpleNamespace(certificate_pem=b"", private_key_pem=b""),
    )
    first = SimpleNamespace(name=MODEL, state=SimpleNamespace(transfers=Transfers()))
    backends = Backends(backend_of(ScriptedEngine([]), tokenizer, api=ApiContext()))
    allocations = HostAllocations(lambda _member: False)
    host_draining = HostDraining(
        hosts.members,
        cast("MembershipService", messages),
        lambda: [(model.pipeline, model.state.incidents) for model in registry],
        on_new_token=lambda: None,
        clock_s=time.monotonic,
        until_written=written_at_once,
    )
    registry = ModelRegistry(
        cast("ServedModel", first),
        cast("Head", head),
        hosts.cache,
        allocations,
        host_draining,
        term=term,
        api_models=ApiModelRegistry(backends),
        former=former,
        can_adopt=bool(former),
        until_written=written_at_once,
    )
    running = asyncio.create_task(registry.run())
    registry.first_serves()
    try:
        yield Serving(hosts, head, registry, backends, messages, allocations, host_draining)
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hosts]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    authority = Authority(make_certificate(dt.datetime.now(dt.UTC)))
    found = Hosts(Members(), NamedDriver(), authority, StageCache(tmp_path / "head"))
    yield found
    await found.driver.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return TinyEmbedder().write(tmp_path / "tiny.gguf")


def order(path: Path, **options: Any) -> LoadRequest:
    return LoadRequest(model=str(path), embeddings=True, ctx_size=64, threads=1, **options)


def needed_bytes(path: Path) -> int:
    return check_embedding_model(order(path)).sizes.memory.total_bytes


async def test_models_are_loaded_where_they_fit_and_unloaded(
    hosts: Hosts, tokenizer: Tokenizer, path: Path
) -> None:
    needed = needed_bytes(path)
    hosts.join("attic", needed * 3 // 2)
    hosts.join("desk", needed)
    async with serving(hosts, tokenizer) as mesh:
        loaded = await mesh.registry.load(order(path))
        stage = {"host": "attic", "layers": "[0, 2)", "threads": 1, "bytes": needed}
        plan = {"plan": "attic holds the whole model", "context": None}
        assert loaded == {"model": "tiny", **plan, "stages": [stage]}
        assert mesh.held_bytes() == {"attic": needed, "desk": 0}
        assert (await mesh.embed()).shape == (3, 64)
        with pytest.raises(InvalidRequest, match="a model is served as 'tiny' already"):
            await mesh.registry.load(order(path))

        # Others have what the first one leaves.
        await mesh.registry.load(order(path, name="second"))
        assert mesh.where("second") == ["desk"]
        assert np.array_equal(await mesh.embed("second"), await mesh.embed())
        with pytest.raises(ModelDoesNotFit, match=r"does not fit on one host: it needs .*; free are "):
            await mesh.registry.load(order(path, name="third"))
        assert not mesh.is_served("third")
        assert [model.load_request.served_name for model in mesh.registry.saved] == ["tiny", "second"]

        assert await mesh.registry.unload("tiny", 1.0) == {"model": "tiny", "unloaded": True, "ended": 0}
        assert mesh.held_bytes() == {"attic": 0, "desk": needed}
        await mesh.registry.load(order(path, name="third"))
        assert mesh.where("third") == ["attic"]
        status = mesh.backend("third").status()
        assert (status.phase, status.ready, status.stages[0].host) == ("serving", True, "attic")
        assert (status.model.dimensions, status.model.pooling) == (64, "mean")
    # With the head all of them end.
    assert mesh.held_bytes() == {"attic": 0, "desk": 0}
    assert list(mesh.backends.embeddings) == []


async def test_one_whose_parts_are_links_to_other_names_is_loaded(
    hosts: Hosts, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    parts = part_paths(TinyEmbedder().write(tmp_path / "parts.gguf", tensors_per_file=10))
    assert len(parts) > 1
    path = linked_parts(parts)
    hosts.join("attic", needed_bytes(path))
    async with serving(hosts, tokenizer) as mesh:
        await mesh.registry.load(order(path))
        assert (await mesh.embed("parts")).shape == (3, 64)


@pytest.mark.parametrize("is_loading", [False, True])
async def test_a_second_order_to_unload_does_not_cut_the_first_one_short(
    hosts: Hosts, tokenizer: Tokenizer, path: Path, monkeypatch: pytest.MonkeyPatch, *, is_loading: bool
) -> None:
    hosts.join("attic", needed_bytes(path))
    stopping, may_stop = asyncio.Event(), asyncio.Event()
    stop = StageHandle.stop

    async def slowly(handle: StageHandle) -> None:
        stopping.set()
        await may_stop.wait()
        await stop(handle)

    monkeypatch.setattr(StageHandle, "stop", slowly)
    async with serving(hosts, tokenizer) as mesh:
        loading = asyncio.create_task(mesh.registry.load(order(path)))
        if is_loading:
            # Loaded, and its keys are not yet those of a ring.
            await until(lambda: hosts.driver.num_created)
        else:
            await loading
        actors = hosts.driver.actors
        orders = [asyncio.create_task(mesh.registry.unload("tiny", 0.0))]
        if not is_loading:
            await stopping.wait()
        orders.append(asyncio.create_task(mesh.registry.unload("tiny", 0.0)))
        await asyncio.sleep(0.05)
        may_stop.set()
        done = {"model": "tiny", "unloaded": True, "ended": 0}
        assert await asyncio.gather(*orders) == [done, done]
        await asyncio.gather(loading, return_exceptions=True)
        # Nothing is left of it: neither its process nor its memory's account.
        assert [actor.is_dead for actor in actors] == [True]
        assert list(mesh.allocations) == []
        await mesh.registry.load(order(path))


async def test_what_makes_no_vectors_is_refused_with_the_key(
    hosts: Hosts, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    hosts.join("attic", 2**33)
    without = TinyEmbedder(pooling=None).write(tmp_path / "without.gguf")
    async with serving(hosts, tokenizer) as mesh:
        with pytest.raises(InvalidModel, match=r"without\.gguf has no bert\.pooling_type"):
            await mesh.registry.load(order(without))
        assert list(mesh.registry) == []
        assert hosts.driver.num_created == 0


async def test_a_lost_process_is_replaced_while_requests_wait(
    hosts: Hosts, tokenizer: Tokenizer, path: Path
) -> None:
    hosts.join("attic", needed_bytes(path))
    async with serving(hosts, tokenizer) as mesh:
        await mesh.registry.load(order(path))
        before = await mesh.embed()
        await mesh.end_process()
        assert np.array_equal(await mesh.embed(), before)
        await until(lambda: mesh.backend().status().repairs.count == 1)
        status = mesh.backend().status()
        assert (status.phase, status.failures[-1].host) == ("serving", "attic")
        assert hosts.driver.num_created == 2
        # Also when nobody asks.
        await mesh.end_process()
        await until(lambda: mesh.backend().status().repairs.count == 2)
        assert np.array_equal(await mesh.embed(), before)


async def test_a_process_that_stands_still_is_replaced(
    hosts: Hosts, tokenizer: Tokenizer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.coordinator.heartbeat._LONGEST_BATCH_S", 0.2)
    hosts.join("attic", needed_bytes(path))
    goes_on = threading.Event()
    async with serving(hosts, tokenizer) as mesh:
        await mesh.registry.load(order(path))
        before = await mesh.embed()
        computed = EmbeddingRuntime.embed

        def stands_still(runtime: EmbeddingRuntime, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
            monkeypatch.setattr(EmbeddingRuntime, "embed", computed)
            goes_on.wait(30)
            return computed(runtime, texts)

        monkeypatch.setattr(EmbeddingRuntime, "embed", stands_still)
        try:
            assert np.array_equal(await asyncio.wait_for(mesh.embed(), 20), before)
        finally:
            goes_on.set()
        status = mesh.backend().status()
        assert "does not end a batch" in status.failures[-1].reason
        assert hosts.driver.num_created == 2


async def test_requests_are_refused_while_no_host_is_there(
    hosts: Hosts, tokenizer: Tokenizer, path: Path
) -> None:
    needed = needed_bytes(path)
    hosts.join("attic", needed)
    async with serving(hosts, tokenizer) as mesh:
        await mesh.registry.load(order(path))
        before = await mesh.embed()
        hosts.members.remove("attic")
        await until(lambda: mesh.model().state.phase.startswith("waiting for hosts"))
        with pytest.raises(StageFailed, match="no host can hold Tiny bert") as refused:
            await mesh.embed()
        assert refused.value.retry_after_s
        hosts.join("desk", needed - 1)
        await until(lambda: "does not fit on one host" in mesh.model().state.phase)
        hosts.join("shed", needed)
        await until(lambda: mesh.backend().status().ready)
        assert np.array_equal(await mesh.embed(), before)
        assert mesh.where() == ["shed"]


async def test_it_moves_when_its_host_is_to_leave(hosts: Hosts, tokenizer: Tokenizer, path: Path) -> None:
    needed = needed_bytes(path)
    hosts.join("attic", 2 * needed)
    hosts.join("desk", needed)
    async with serving(hosts, tokenizer) as mesh:
        await mesh.registry.load(order(path))
        before = await mesh.embed()
        hosts.members.update("attic", is_leaving=True)
        while mesh.where() == ["attic"]:
            assert np.array_equal(await mesh.embed(), before)
            await asyncio.sleep(0)
        assert mesh.where() == ["desk"]
        assert np.array_equal(await mesh.embed(), before)
        await until(lambda: mesh.backend().status().repairs.moves == 1)
        attic = hosts.members.find("attic")
        assert attic is not None
        mesh.host_draining.release_if_free(attic)
        assert mesh.messages.said.let_go == ["attic"]
        assert mesh.held_bytes() == {"desk": needed}

        # Where no other host has room, it stays.
        with pytest.raises(ClusterError, match="desk cannot be drained: no host can hold Tiny bert"):
            await mesh.host_draining.drain("desk")
        assert np.array_equal(await mesh.embed(), before)
        assert mesh.backend().status().repairs == RepairStatus(moves=1)


async def test_it_moves_from_a_host_that_keeps_no_layers_for_another_reason(
    hosts: Hosts, tokenizer: Tokenizer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.join("attic", 2 * needed_bytes(path))
    hosts.join("desk", needed_bytes(path))
    async with serving(hosts, tokenizer) as mesh:
        await mesh.registry.load(order(path))
        monkeypatch.setattr(Member, "keeps_layers", property(lambda member: member.name != "attic"))
        hosts.members.update("attic", is_ready=True)
        await until(lambda: mesh.where() == ["desk"])
        assert not mesh.messages.said.let_go


def set_aside(path: Path) -> Path:
    """Rename the file."""
    return path.rename(path.with_stem("aside"))


def damage(path: Path) -> None:
    """Put a file in its place that is no model."""
    set_aside(path)
    path.write_bytes(b"GGUF")


def replaced(path: Path) -> Path:
    """Put another model in its place; returns where the old one is."""
    aside = set_aside(path)
    TinyEmbedder(seed=2).write(path)
    return aside


async def test_its_host_is_not_drained_for_a_replaced_model(
    hosts: Hosts, tokenizer: Tokenizer, path: Path
) -> None:
    needed = needed_bytes(path)
    hosts.join("attic", needed)
    async with serving(hosts, tokenizer) as mesh:
        await mesh.registry.load(order(path))
        before = await mesh.embed()
        hosts.join("desk", needed)
        aside = replaced(path)
        refused = r"attic cannot be drained: .*tiny\.gguf was changed since it was served"
        with pytest.raises(ClusterError, match=refused):
            await asyncio.wait_for(mesh.host_draining.drain("attic"), 20)
        assert not mesh.host_draining.leaving
        # A host that leaves by itself is told.
        hosts.members.update("attic", is_leaving=True)
        await until(lambda: any("leaves anyway in 15 s" in said for said in mesh.messages.said.announced))
        assert mesh.where() == ["attic"]
        assert np.array_equal(await mesh.embed(), before)
        aside.rename(path)
        await until(lambda: mesh.where() == ["desk"])
        assert np.array_equal(await mesh.embed(), before)


async def test_requests_are_refused_while_a_lost_model_is_replaced(
    hosts: Hosts, tokenizer: Tokenizer, path: Path
) -> None:
    hosts.join("attic", needed_bytes(path))
    async with serving(hosts, tokenizer) as mesh:
        await mesh.registry.load(order(path))
        before = await mesh.embed()
        aside = replaced(path)
        await mesh.end_process()
        with pytest.raises(StageFailed, match=r"tiny\.gguf was changed since it was served") as refused:
            await asyncio.wait_for(mesh.embed(), 20)
        assert refused.value.retry_after_s
        await until(lambda: mesh.model().state.phase.startswith("waiting for the model: "))
        aside.rename(path)
        await until(lambda: mesh.backend().status().ready)
        assert np.array_equal(await mesh.embed(), before)
        assert mesh.backend().status().phase == "serving"


async def test_a_file_that_is_gone_is_waited_for(hosts: Hosts, tokenizer: Tokenizer, path: Path) -> None:
    hosts.join("attic", needed_bytes(path))
    async with serving(hosts, tokenizer) as mesh:
        await mesh.registry.load(order(path))
        before = await mesh.embed()
        aside = set_aside(path)
        await mesh.end_process()
        await until(lambda: mesh.model().state.phase.startswith("waiting for the model: "))
        aside.rename(path)
        await until(lambda: mesh.backend().status().ready)
        assert np.array_equal(await mesh.embed(), before)


@pytest.mark.parametrize("change", ["none", "of the file", "of the process"])
async def test_the_next_head_takes_it_over_unless_something_changed(
    hosts: Hosts, tokenizer: Tokenizer, path: Path, change: str
) -> None:
    needed = needed_bytes(path)
    hosts.join("attic", needed)
    async with serving(hosts, tokenizer) as former:
        await former.registry.load(order(path))
        before = await former.embed()
        saved = former.saved()
        # A head that is killed ends nothing.
        former.model().pipeline.stages = ()
    if change == "of the process":
        hosts.driver.kill(hosts.driver.find(saved[0].stages[0].actor))
        await hosts.driver.close()
    if change == "of the file":
        # Not in place: the process still reads the former one.
        TinyEmbedder(seed=2).write(path.with_stem("other")).replace(path)
    async with serving(hosts, tokenizer, former=saved, term=8) as mesh:
        # The first model plans once it is known what the others hold, however early it asks.
        await mesh.registry.settled()
        if change == "none":
            assert mesh.held_bytes() == {"attic": needed}
        await until(mesh.is_served)
        assert np.array_equal(await mesh.embed(), before) == (change != "of the file")
        assert hosts.driver.num_created == (1 if change == "none" else 2)
        assert mesh.held_bytes() == {"attic": needed}
        assert [model.load_request.served_name for model in mesh.registry.saved] == ["tiny"]
        await mesh.registry.unload("tiny", 1.0)
    await hosts.driver.close()
    assert all(actor.is_dead for actor in hosts.driver._actors.values())


async def former_of(hosts: Hosts, tokenizer: Tokenizer, path: Path) -> tuple[SavedModel, ...]:
    """What a head recorded that was killed while it served the model."""
    async with serving(hosts, tokenizer) as former:
        await former.registry.load(order(path))
        saved = former.saved()
        former.model().pipeline.stages = ()
    return saved


async def test_what_is_taken_over_stays_recorded_meanwhile(
    hosts: Hosts, tokenizer: Tokenizer, path: Path
) -> None:
    hosts.join("attic", needed_bytes(path))
    saved = await former_of(hosts, tokenizer, path)
    records = []
    async with serving(hosts, tokenizer, former=saved, term=8) as mesh:
        await asyncio.sleep(0)
        while not mesh.is_served():
            records.append(mesh.registry.saved)
            await asyncio.sleep(0)
        records.append(mesh.registry.saved)
        # The head may die again at any time.
        assert all(record == saved for record in records)
        await mesh.registry.unload("tiny", 1.0)
        assert mesh.registry.saved == ()


@pytest.mark.parametrize("what", ["the file is damaged", "its host is away", "it cannot be wired"])
async def test_what_is_not_taken_over_is_ended(
    hosts: Hosts, tokenizer: Tokenizer, path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    hosts.join("attic", needed_bytes(path))
    saved = await former_of(hosts, tokenizer, path)
    (process,) = hosts.driver.actors
    if what == "the file is damaged":
        damage(path)
    elif what == "its host is away":
        away = hosts.members.find("attic")
        assert away is not None
        hosts.members.remove("attic")
    else:

        async def fail(*_: object) -> None:
            raise StageFailed("it cannot be wired")

        monkeypatch.setattr(process.stage, "rejoin", fail)
    async with serving(hosts, tokenizer, former=saved, term=8) as mesh:
        if what == "its host is away":
            await until(lambda: [each.state.phase for each in mesh.registry] == ["taking over"])
            await mesh.registry.unload("tiny", 0.0)
        elif what == "it cannot be wired":
            await until(mesh.is_served)
            assert hosts.driver.num_created == 2
        await until(lambda: process.is_dead)
