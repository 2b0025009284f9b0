"""Hosts that leave while the first model is loaded: real stages, members, links and weights, but no Ray.

The mesh outlasts them: it waits for as many hosts as it was told to, and places the model again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from structlog.testing import capture_logs

from mesh.cluster.host_facts import HostFacts, read_versions
from mesh.cluster.join_token import encode
from mesh.cluster.link_probe import LinkSurvey
from mesh.cluster.members import Member
from mesh.engine import GenerationRequest
from mesh.options.model import LoadRequest
from mesh.serve.allocations import HostAllocations
from mesh.serve.deployment import HostWatch, ModelDeployment
from mesh.serve.head_failover import _saved_stages
from mesh.serve.head_state import SavedModel
from mesh.serve.host_draining import HostDraining
from mesh.serve.main import _api_context
from mesh.serve.model_coordinator import CoordinatorParts
from mesh.serve.preflight import check_model
from mesh.serve.served_model import new_model
from spanmesh_proto.errors import ModelDoesNotFit, StageFailed
from tests.mesh.cluster.test_membership import HeadSide, head, until
from tests.mesh.cluster.test_membership_rejoin import Host
from tests.support.on_demand import head_options
from tests.support.ring_harness import collect
from tests.support.serve_harness import InProcessActor, InProcessDriver, written_at_once
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, MutableMapping
    from pathlib import Path

    from mesh.serve.head import Head
    from mesh.serve.served_model import ServedModel
    from mesh.serve.status import MeshState

pytestmark = pytest.mark.model

OWN = Member("alpha", "127.0.0.1", HostFacts(2**30, 1, 20.0, read_versions()), "alpha.1", is_ready=True)
REQUEST = GenerationRequest(tuple(range(10, 20)), max_tokens=6)


class HoldingDriver(InProcessDriver):
    """Its actors on some hosts do not get beyond a step.

    Attributes:
        held: The step, by host: a method of the actor.
        fails: Once this is set, that step fails.
        actors: All that were started, with the names of their hosts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, str] = {}
        self.fails = asyncio.Event()
        self.actors: list[tuple[str, InProcessActor]] = []
        self._by_name: dict[str, InProcessActor] = {}

    def find(self, name: str) -> InProcessActor:
        actor = self._by_name.get(name)
        if actor is None or actor.is_dead:
            raise StageFailed(f"the process {name} has ended")
        return actor

    def names(self) -> list[str]:
        """Names of all that run."""
        return [name for name, actor in self._by_name.items() if not actor.is_dead]

    async def create(self, kind: type, *arguments: Any, ray_node_name: str, **more: Any) -> InProcessActor:
        actor = await super().create(kind, *arguments, ray_node_name=ray_node_name, **more)
        host = ray_node_name.partition(".")[0]
        self.actors.append((host, actor))
        self._by_name[more["name"]] = actor
        if host in self.held:
            self.hold(host, self.held[host])
        return actor

    def hold(self, host: str, step: str) -> None:
        """Hold the actors of a host at a step, those that run and those to come."""
        self.held[host] = step

        async def hang(*_: object) -> None:
            await self.fails.wait()
            raise StageFailed(f"what {host} held is gone")

        for name, actor in self.actors:
            if name == host:
                setattr(actor.stage, step, hang)


class Loading:
    """A head that loads its first model.

    Attributes:
        hosts: Those that joined.
        logs: All that was logged.
        deployment: Of the model.
        task: Loads the model, then supervises it.
    """

    def __init__(
        self, side: HeadSide, new: Callable[[], ServedModel], driver: HoldingDriver | None = None
    ) -> None:
        self.side = side
        self.driver = driver or HoldingDriver()
        self.hosts: dict[str, Host] = {}
        self.logs: list[MutableMapping[str, Any]] = []
        self._new = new
        self.start(None)

    def start(self, former: SavedModel | None) -> None:
        """Begin, or begin anew as the next head does."""
        side, self.model = self.side, self._new()
        open_head = SimpleNamespace(
            driver=self.driver,
            own=OWN,
            members=side.members,
            service=side.service,
            survey=LinkSurvey(
                OWN,
                side.members,
                side.service,
                side.service.link_secret,
                side.authority.own_identity(["alpha"], "127.0.0.1"),
            ),
            authority=side.authority,
            source_for=lambda _member: side.source,
            token=encode(side.token),
            is_own=lambda member: member.ray_node_name == OWN.ray_node_name,
        )
        self.allocations = HostAllocations(open_head.is_own)
        self.host_draining = HostDraining(
            side.members,
            side.service,
            lambda: [(self.model.pipeline, self.model.state.incidents)],
            on_new_token=lambda: None,
            clock_s=time.monotonic,
            until_written=written_at_once,
        )
        self.deployment = ModelDeployment(
            self.model,
            cast("Head", open_head),
            side.cache,
            self.allocations,
            self.host_draining,
            parts=CoordinatorParts(),
            former=former,
            term=7 if former is None else 8,
            before_planning=written_at_once,
        )
        self.task = asyncio.create_task(self.deployment.run(lambda: None))

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def restart(self) -> None:
        """Go on as the next head after a crash."""
        self.start(await self.crash())

    async def crash(self) -> SavedModel:
        """End as a head that is killed; returns what it recorded."""
        pipeline = self.model.pipeline
        former = SavedModel({}, self.model.setup, _saved_stages(pipeline))
        # It ends nothing.
        pipeline.stages = ()
        await self.stop()
        return former

    async def join(self, name: str, memory_bytes: int = 2**30) -> None:
        before = len(self.side.members.ready)
        self.hosts[name] = Host(self.side, name=name, memory_bytes=memory_bytes)
        await until(self.side.members, before + 1)

    async def lose(self, name: str) -> None:
        """End a host as abruptly as a process ends."""
        host = self.hosts.pop(name)
        host.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await host.task

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not is_so():
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.01)

    @property
    def phase(self) -> str:
        return self.model.state.phase

    def is_loaded(self, name: str) -> bool:
        return any(handle.is_loaded for handle in self.model.pipeline.loading if handle.member.name == name)

    def stage_hosts(self) -> set[str]:
        return {handle.member.name for handle in self.model.pipeline.handles}

    def given_up(self) -> list[str]:
        """Why placements were given up, as logged."""
        return [entry["reason"] for entry in self.logs if entry["event"] == "placement_given_up"]


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "hosts"))
    monkeypatch.setattr("mesh.serve.deployment._PAUSE_S", 0.1)


@asynccontextmanager
async def loading(
    tmp_path: Path,
    *,
    load_request: LoadRequest | None = None,
    driver: HoldingDriver | None = None,
    **asked: Any,
) -> AsyncIterator[Loading]:
    path = TinyModel("llama").write(tmp_path / "tiny.gguf")
    options = head_options().changed(
        model=path,
        name="alpha",
        head_only=True,
        ctx_size=64,
        parallel=2,
        exact=True,
        speculate="off",
        **{"num_hosts": 2, "stages": 2, **asked},
    )
    known = check_model(options, lambda: OWN.facts)
    async with head(tmp_path) as side:
        with capture_logs() as logs:
            mesh = Loading(side, lambda: new_model("tiny", options, known, load_request=load_request), driver)
            mesh.logs = logs
            try:
                yield mesh
            finally:
                await mesh.stop()
                for name in list(mesh.hosts):
                    await mesh.lose(name)
                await mesh.driver.close()


async def require_an_answer(mesh: Loading) -> None:
    coordinator = mesh.model.engine.coordinator
    assert coordinator is not None
    tokens, _ = await collect(coordinator, REQUEST)
    assert len(tokens) == 6


# While one stage is loaded and the other one not yet, and while the ring is connected.
@pytest.mark.parametrize("step", ["load", "start"])
async def test_a_host_that_leaves_is_waited_for_and_the_model_placed_again(tmp_path: Path, step: str) -> None:
    async with loading(tmp_path) as mesh:
        mesh.driver.held["gamma"] = step
        await mesh.join("beta")
        await mesh.join("gamma")
        if step == "load":
            await mesh.until(lambda: mesh.is_loaded("beta"))
        else:
            await mesh.until(lambda: mesh.phase == "connecting")
        await mesh.lose("gamma")
        await mesh.until(lambda: mesh.phase == "waiting for 1 of 2 hosts")
        # Nothing of it is left, in processes or in the accounts.
        await mesh.driver.close()
        assert [actor.is_dead for _, actor in mesh.driver.actors] == [True, True]
        (beta,) = mesh.side.members
        assert (mesh.allocations.held_bytes(beta), beta.layers) == (0, "")
        assert mesh.model.state.plan is None
        assert mesh.given_up() == ["host gamma left the mesh before its layers were loaded"]
        assert not mesh.task.done()

        # Another one does as well as the same.
        mesh.driver.held.clear()
        name = "delta" if step == "load" else "gamma"
        await mesh.join(name)
        await mesh.until(lambda: mesh.phase == "serving")
        assert mesh.stage_hosts() == {"beta", name}
        await require_an_answer(mesh)
        assert len(mesh.given_up()) == 1


async def test_a_ring_that_was_taken_over_may_lose_a_host_before_it_is_connected(tmp_path: Path) -> None:
    async with loading(tmp_path) as mesh:
        await mesh.join("beta")
        await mesh.join("gamma")
        await mesh.until(lambda: mesh.phase == "serving")
        mesh.driver.hold("gamma", "rejoin")
        await mesh.restart()
        await mesh.until(lambda: mesh.phase == "connecting")
        assert len(mesh.driver.actors) == 2
        await mesh.lose("gamma")
        await mesh.until(lambda: mesh.phase == "waiting for 1 of 2 hosts")
        mesh.driver.held.clear()
        await mesh.join("gamma")
        await mesh.until(lambda: mesh.phase == "serving")
        assert mesh.stage_hosts() == {"beta", "gamma"}
        assert len(mesh.driver.actors) == 4
        await require_an_answer(mesh)
        assert mesh.given_up() == ["host gamma left the mesh before its layers were loaded"]


async def test_what_fails_before_its_host_is_missed_is_no_failure_of_the_model(tmp_path: Path) -> None:
    async with loading(tmp_path) as mesh:
        mesh.driver.held["gamma"] = "load"
        await mesh.join("beta")
        await mesh.join("gamma")
        await mesh.until(lambda: mesh.is_loaded("beta"))
        # Its process ends, or Ray drops it, a moment before the head loses the host.
        mesh.driver.fails.set()
        await mesh.until(lambda: not mesh.model.pipeline.loading)
        await asyncio.sleep(0.2)
        assert mesh.phase == "loading"
        await mesh.lose("gamma")
        mesh.driver.held.clear()
        await mesh.join("gamma")
        await mesh.until(lambda: mesh.phase == "serving")
        assert mesh.stage_hosts() == {"beta", "gamma"}
        assert mesh.given_up() == ["what gamma held is gone"]


async def test_what_fails_on_hosts_that_stay_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.serve.deployment._DEPARTURE_S", 0.2)
    async with loading(tmp_path) as mesh:
        mesh.driver.held["gamma"] = "load"
        mesh.driver.fails.set()
        await mesh.join("beta")
        await mesh.join("gamma")
        with pytest.raises(StageFailed, match="what gamma held is gone"):
            await asyncio.wait_for(mesh.task, 20)
        assert mesh.given_up() == []


async def test_a_host_that_wants_to_leave_meanwhile_is_let_go(tmp_path: Path) -> None:
    async with loading(tmp_path) as mesh:
        mesh.driver.held["gamma"] = "load"
        await mesh.join("beta")
        await mesh.join("gamma")
        await mesh.until(lambda: mesh.is_loaded("beta"))
        # As Ctrl-C there does.
        mesh.side.members.update("gamma", is_leaving=True)
        await asyncio.wait_for(mesh.hosts.pop("gamma").task, 20)
        await mesh.until(lambda: mesh.phase == "waiting for 1 of 2 hosts")
        await mesh.join("delta")
        await mesh.until(lambda: mesh.phase == "serving")
        assert mesh.stage_hosts() == {"beta", "delta"}


async def test_hosts_are_drained_and_evicted_before_the_mesh_serves(tmp_path: Path) -> None:
    async with loading(tmp_path) as mesh:
        # While hosts are waited for.
        await mesh.join("beta")
        await mesh.until(lambda: mesh.phase == "waiting for 1 of 2 hosts")
        await asyncio.wait_for(mesh.host_draining.drain("beta"), 20)
        await asyncio.wait_for(mesh.hosts.pop("beta").task, 20)
        await mesh.until(lambda: mesh.phase == "waiting for 2 of 2 hosts")
        # While stages are loaded there.
        mesh.driver.held["gamma"] = "load"
        await mesh.join("delta")
        await mesh.join("gamma")
        await mesh.until(lambda: mesh.is_loaded("delta"))
        drained = await asyncio.wait_for(mesh.host_draining.drain("gamma"), 20)
        assert drained == {"host": "gamma", "drained": True}
        await asyncio.wait_for(mesh.hosts.pop("gamma").task, 20)
        await mesh.until(lambda: mesh.phase == "waiting for 1 of 2 hosts")
        await asyncio.wait_for(mesh.host_draining.evict("delta"), 20)
        await asyncio.gather(mesh.hosts.pop("delta").task, return_exceptions=True)
        await mesh.until(lambda: mesh.phase == "waiting for 2 of 2 hosts")
        assert not mesh.task.done()


def test_hosts_may_be_sent_away_as_soon_as_the_head_is_open() -> None:
    head_parts = SimpleNamespace(host_draining=object())
    state = SimpleNamespace(head=None, is_serving=False)
    api = _api_context(cast("MeshState", state))
    assert api.host_admin() is None
    state.head = head_parts
    assert api.host_admin() is head_parts.host_draining
    assert api.model_admin() is None


async def test_hosts_that_are_too_small_without_it_wait_for_one_that_is_not(tmp_path: Path) -> None:
    async with loading(tmp_path, num_hosts=1, stages=None) as mesh:
        mesh.driver.held["gamma"] = "load"
        mesh.driver.starts.clear()
        await mesh.join("gamma")
        await mesh.until(lambda: mesh.model.pipeline.loading)
        await mesh.join("beta", memory_bytes=2**20)
        await mesh.lose("gamma")
        await mesh.until(lambda: mesh.phase.startswith("waiting for hosts: "))
        assert "does not fit" in mesh.phase
        mesh.driver.starts.set()
        await mesh.join("delta")
        await mesh.until(lambda: mesh.phase == "serving")
        assert mesh.stage_hosts() == {"delta"}
        assert len(mesh.given_up()) == 2


async def test_what_does_not_fit_at_first_is_an_error_at_once(tmp_path: Path) -> None:
    async with loading(tmp_path, num_hosts=1, stages=None) as mesh:
        await mesh.join("beta", memory_bytes=2**20)
        with pytest.raises(ModelDoesNotFit):
            await asyncio.wait_for(mesh.task, 20)


async def test_who_loads_a_model_beside_others_hears_of_it(tmp_path: Path) -> None:
    asked = LoadRequest.model_validate({"model": str(tmp_path / "tiny.gguf")})
    async with loading(tmp_path, load_request=asked) as mesh:
        mesh.driver.held["gamma"] = "load"
        await mesh.join("beta")
        await mesh.join("gamma")
        await mesh.until(lambda: mesh.is_loaded("beta"))
        await mesh.lose("gamma")
        with pytest.raises(StageFailed, match=r"host gamma left .*; start `mesh load` again"):
            await asyncio.wait_for(mesh.task, 20)


async def test_a_host_that_was_away_for_a_moment_counts_as_gone(tmp_path: Path) -> None:
    async with head(tmp_path) as side:
        host = Host(side, name="beta")
        await until(side.members, 1)
        (member,) = side.members
        watch = HostWatch(side.members)
        assert not await watch.departure_within(0.0)
        watch.keep_to([member])
        assert not await watch.departure_within(0.01)
        waiting = asyncio.create_task(watch.departure())
        await asyncio.sleep(0)
        side.members.remove("beta")
        await asyncio.sleep(0)
        side.members.admit(member)
        await asyncio.wait_for(waiting, 5)
        assert watch.gone == "beta"
        side.members.update("beta", is_ready=True)
        assert watch.look()
        side.service.dismiss("beta", "goodbye")
        await host.outcome()
