"""Heads that die at any of their steps: the next one serves a whole ring, and nothing else is left running.

Real stages, links and weights, but no Ray: processes outlive their head, and its state is what it wrote last.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any, cast

import pytest

from mesh.serve.head_failover import _saved_replicas, _saved_stages, kill_unrecorded_actors, ring_fault
from mesh.serve.head_state import SavedModel
from spanmesh_proto.errors import StageFailed
from tests.mesh.serve.test_first_placement import HoldingDriver, loading, require_an_answer
from tests.mesh.serve.test_head_state import STATE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mesh.cluster.ray_driver import RayDriver
    from tests.mesh.serve.test_first_placement import Loading
    from tests.support.serve_harness import InProcessActor

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "hosts"))
    monkeypatch.setattr("mesh.serve.deployment._PAUSE_S", 0.1)


class _Call:
    def __init__(self, driver: MortalDriver, actor: InProcessActor, name: str) -> None:
        self._driver = driver
        self._method = getattr(actor, name)
        self._name = name

    async def remote(self, *arguments: Any) -> Any:
        # How often a stage is asked for its progress depends on the time.
        is_last = self._name != "progress" and self._driver.step()
        if not is_last or self._driver.is_last_done:
            await self._driver.alive()
            result = await self._method.remote(*arguments)
        if is_last:
            self._driver.die()
        await self._driver.alive()
        return result


class _Process:
    """A process as one head sees it."""

    def __init__(self, driver: MortalDriver, actor: InProcessActor) -> None:
        self._driver = driver
        self.actor = actor

    def __getattr__(self, name: str) -> _Call:
        return _Call(self._driver, self.actor, name)


class MortalDriver(HoldingDriver):
    """The driver of a head that dies at one of its calls; the processes outlive it.

    Attributes:
        num_steps: Calls so far.
        dies_at: The last call, counted from 0; None for a head that lives.
        is_last_done: Whether the last call still has its effect.
        on_step: Called before each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0
        self.dies_at: int | None = None
        self.is_last_done = False
        self.on_step: Callable[[], None] = lambda: None
        self.dead, self._over = asyncio.Event(), asyncio.Event()

    def step(self) -> bool:
        """Count a call; returns whether it is the last."""
        self.on_step()
        self.num_steps += 1
        return self.dies_at is not None and self.num_steps == self.dies_at + 1

    def die(self) -> None:
        self.dead.set()

    async def alive(self) -> None:
        """Return at once, while the head lives."""
        if self.dead.is_set():
            await self._over.wait()
            raise StageFailed("this head is dead")

    async def create(self, kind: type, *arguments: Any, ray_node_name: str, **more: Any) -> Any:
        if is_last := self.step():
            self.die()
        if not is_last or self.is_last_done:
            actor = await super().create(kind, *arguments, ray_node_name=ray_node_name, **more)
        await self.alive()
        return _Process(self, actor)

    def find(self, name: str) -> Any:
        return _Process(self, super().find(name))

    def kill(self, actor: Any) -> None:
        if not self.dead.is_set():
            super().kill(actor.actor if isinstance(actor, _Process) else actor)

    def next_head(self) -> None:
        """Forget the dead head; what it started runs."""
        self.num_steps, self.dies_at = 0, None
        self.dead, self._over = asyncio.Event(), asyncio.Event()

    def end(self) -> None:
        """Let calls of the dead head fail."""
        self._over.set()


async def begun(mesh: Loading, driver: MortalDriver, work: str, dies_at: int | None) -> None:
    """Bring a mesh to the moment before some work, then do that; steps are counted from there."""
    await mesh.join("beta", 2**30)
    if work != "load":
        await mesh.join("gamma", 2**30)
        await mesh.until(lambda: mesh.phase == "serving")
    if work == "move":
        await mesh.join("delta", 2**30)
    driver.num_steps, driver.dies_at = 0, dies_at
    if work == "load":
        await mesh.join("gamma", 2**30)
    elif work == "repair":
        handle = mesh.model.pipeline.stages[0].handle
        assert handle is not None
        driver.kill(handle._actor)
        await mesh.until(lambda: mesh.phase != "serving")
    else:
        mesh.side.members.update("beta", is_leaving=True)
        await mesh.until(lambda: "beta" not in mesh.stage_hosts())
    await mesh.until(lambda: mesh.phase == "serving")


async def num_steps_of(tmp_path: Path, work: str) -> int:
    """Calls to processes that some work takes."""
    driver = MortalDriver()
    async with loading(tmp_path, driver=driver) as mesh:
        await begun(mesh, driver, work, None)
        return driver.num_steps


async def outlived(tmp_path: Path, work: str, step: int, *, is_done: bool, is_late: bool) -> list[str]:
    """Let a head die and the next one follow.

    Args:
        tmp_path: For its files.
        work: During which it dies.
        step: At which call.
        is_done: Whether that call has its effect.
        is_late: Whether the state is one that was written before.

    Returns:
        What the next head logged about the takeover.
    """
    driver = MortalDriver()
    records: list[SavedModel] = []
    async with loading(tmp_path, driver=driver) as mesh:

        def write() -> None:
            model = mesh.model
            stages, copies = _saved_stages(model.pipeline), _saved_replicas(model.pipeline)
            record = SavedModel({}, model.setup, stages, copies)
            if not records or records[-1] != record:
                records.append(record)

        driver.on_step, driver.is_last_done = write, is_done
        beginning = asyncio.create_task(begun(mesh, driver, work, step))
        await asyncio.wait_for(driver.dead.wait(), 30)
        former = records[-2 if is_late and len(records) > 1 else -1]
        beginning.cancel()
        driver.end()
        mesh.model.pipeline.stages, mesh.model.pipeline.replicas = (), []
        await mesh.stop()
        await asyncio.gather(beginning, return_exceptions=True)

        driver.next_head()
        driver.on_step = lambda: None
        mesh.logs.clear()
        state = dataclasses.replace(STATE, stages=former.stages, copies=former.copies, models=())
        kill_unrecorded_actors(cast("RayDriver", driver), state)
        mesh.start(former)
        await mesh.until(lambda: mesh.phase == "serving")
        await require_an_answer(mesh)
        pipeline = mesh.model.pipeline

        def is_nothing_else_left() -> bool:
            held = (*pipeline.handles, *pipeline.replicas, *pipeline.loading, *pipeline.loading_replicas)
            return set(driver.names()) <= {handle.actor_name for handle in held}

        await mesh.until(is_nothing_else_left)
        for member in mesh.side.members:
            mine = [each.config.memory.total_bytes for each in pipeline.handles if each.member == member]
            assert mesh.allocations.held_bytes(member) >= sum(mine)
        assert ring_fault(_saved_stages(pipeline), mesh.model.known.model.n_layers) is None
        return [entry["event"] for entry in mesh.logs if "taken_over" in entry["event"]]


@pytest.mark.parametrize(("work", "step"), [("repair", 6), ("move", 7)])
async def test_a_head_may_die_while_the_ring_changes(tmp_path: Path, work: str, step: int) -> None:
    await outlived(tmp_path, work, step, is_done=True, is_late=False)


@pytest.mark.sweep
@pytest.mark.parametrize("work", ["load", "repair", "move"])
@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("is_late", [True, False])
async def test_a_head_may_die_at_every_step(
    tmp_path: Path, work: str, *, is_done: bool, is_late: bool
) -> None:
    taken_over: list[str] = []
    for step in range(await num_steps_of(tmp_path, work)):
        taken_over += await outlived(tmp_path, work, step, is_done=is_done, is_late=is_late)
    # The ring that serves while another one is loaded.
    assert work != "move" or is_late or "stages_taken_over" in taken_over


async def test_what_is_no_whole_ring_is_ended_and_the_model_loaded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = HoldingDriver()
    async with loading(tmp_path, driver=driver) as mesh:
        await mesh.join("beta")
        await mesh.join("gamma")
        await mesh.until(lambda: mesh.phase == "serving")

        def half(record: SavedModel) -> SavedModel:
            return dataclasses.replace(record, stages=record.stages[:1])

        def other_half(record: SavedModel) -> SavedModel:
            return dataclasses.replace(record, stages=record.stages[1:])

        def only_a_copy(record: SavedModel) -> SavedModel:
            return dataclasses.replace(record, stages=(), copies=record.stages)

        def another_address(record: SavedModel) -> SavedModel:
            port = (record.stages[1].address or "").rpartition(":")[2]
            moved = dataclasses.replace(record.stages[1], address=f"127.0.0.9:{port}")
            return dataclasses.replace(record, stages=(record.stages[0], moved))

        def other_content(record: SavedModel) -> SavedModel:
            stage = driver.find(record.stages[0].actor).stage
            shorter = dataclasses.replace(stage._config.options, ctx_size=32)
            stage._config = dataclasses.replace(stage._config, options=shorter)
            return record

        def no_wiring(record: SavedModel) -> SavedModel:
            async def fail(*_: object) -> None:
                raise StageFailed("it cannot be wired")

            monkeypatch.setattr(driver.find(record.stages[1].actor).stage, "rejoin", fail)
            return record

        for spoil in (half, other_half, only_a_copy, another_address, other_content, no_wiring):
            before = set(driver.names())
            former = spoil(await mesh.crash())
            kill_unrecorded_actors(
                cast("RayDriver", driver),
                dataclasses.replace(STATE, stages=former.stages, copies=former.copies, models=()),
            )
            mesh.start(former)
            assert mesh.deployment.former is former
            await mesh.until(lambda: mesh.phase == "serving")
            assert mesh.deployment.former is None
            await require_an_answer(mesh)
            assert before.isdisjoint(driver.names()), spoil
            assert len(driver.names()) == 2, spoil
