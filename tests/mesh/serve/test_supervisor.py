"""A mesh that is kept whole: real stages of a real model, moved and made anew while answers are written."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mesh.cluster.members import Member
from mesh.engine import GenerationRequest
from mesh.placement.memory_estimate import StageSizes
from spanmesh_proto.errors import ClusterError, ModelDoesNotFit, StageFailed
from stages.layers import LayerRange
from stages.slicing.model_facts import read_model_facts
from tests.support.ring_harness import collect
from tests.support.serve_harness import PARTS, WORKLOAD, InProcessActor, Serving, host, serving, stage_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("cut_stages")]

REQUEST = GenerationRequest(tuple(range(100, 112)), max_tokens=60)
ROOMY = {"a": 9.0, "b": 9.0, "c": 9.0}


async def answer(mesh: Serving, request: GenerationRequest = REQUEST) -> list[int]:
    return (await collect(mesh.coordinator, request))[0]


async def some_way(mesh: Serving, request: GenerationRequest = REQUEST) -> asyncio.Task[list[int]]:
    """An answer of which ten tokens or more have come."""
    count = 0
    begun = asyncio.Event()

    async def ask() -> list[int]:
        nonlocal count
        tokens: list[int] = []
        async for part in mesh.coordinator.generate(request):
            tokens.extend(part.tokens)
            if len(tokens) >= 10:
                begun.set()
        return tokens

    task = asyncio.create_task(ask())
    await asyncio.wait_for(begun.wait(), 30)
    return task


async def test_a_warm_spare_takes_over_and_another_is_prepared(smollm2_path: Path) -> None:
    async with serving(smollm2_path, ROOMY | {"spare": 9.0}) as mesh:
        wanted = await answer(mesh)
        await mesh.until(lambda: len(mesh.pipeline.replicas) == 3)
        under_way = await some_way(mesh)
        num_created = mesh.driver.num_created
        mesh.kill(1)
        assert await under_way == wanted
        assert mesh.hosts() == ["a", "spare", "c"]
        (failure,) = mesh.incidents.failures
        assert (failure.host, failure.layers) == ("b", "[10, 20)")
        assert mesh.incidents.repairs.count == 1
        # Not a single stage was loaded for it. Now b is the spare.
        await mesh.until(lambda: "b" in {copy.member.name for copy in mesh.pipeline.replicas})
        assert mesh.driver.num_created > num_created
        assert await answer(mesh) == wanted


async def test_a_copy_that_followed_computes_only_what_it_was_not_told(smollm2_path: Path) -> None:
    # Copies follow some windows behind: the answer has to be under way still when one knows its beginning.
    request = replace(REQUEST, max_tokens=180)
    async with serving(smollm2_path, ROOMY | {"spare": 9.0}) as mesh:
        wanted = await answer(mesh, request)
        await mesh.until(lambda: len(mesh.pipeline.replicas) == 3)
        copy = next(copy for copy in mesh.pipeline.replicas if copy.config.layers == LayerRange(10, 20))
        service = copy._actor.stage._service
        told, latest = service._engine.slots.tokens, service._engine.sessions._latest
        under_way = await some_way(mesh, request)
        (session,) = mesh.coordinator._sessions
        num_told = len(REQUEST.prompt) + 10
        # The slot may hold more from the answer before this one.
        await mesh.until(
            lambda: any(latest[slot] == session and told.length(slot) >= num_told for slot in latest)
        )
        assert service.stats().num_rows == 0
        mesh.kill(1)
        assert await under_way == wanted
        assert mesh.hosts() == ["a", "spare", "c"]
        num_rows = service.stats().num_rows
    # What it was told of and nobody knew to be computed at the tail is computed again too.
    assert 0 < num_rows <= len(REQUEST.prompt) + len(wanted) - num_told + 3


async def test_a_host_that_leaves_keeps_its_layers_until_another_has_them(smollm2_path: Path) -> None:
    async with serving(smollm2_path, ROOMY) as mesh:
        wanted = await answer(mesh)
        under_way = await some_way(mesh)
        assert await asyncio.wait_for(mesh.host_draining.drain("c"), 60) == {"host": "c", "drained": True}
        assert await under_way == wanted
        assert mesh.messages.said.let_go == ["c"]
        assert "c" not in mesh.hosts()
        repairs = mesh.incidents.repairs
        assert (repairs.count, repairs.moves, mesh.incidents.failures) == (0, 1, ())


async def test_what_fits_nowhere_is_not_drained_and_nothing_changes(smollm2_path: Path) -> None:
    async with serving(smollm2_path, dict.fromkeys("abc", 1.1)) as mesh:
        under_way = await some_way(mesh)
        with pytest.raises(
            ClusterError, match="b cannot be drained: no other host can hold the layers to move"
        ):
            await asyncio.wait_for(mesh.host_draining.drain("b"), 60)
        assert len(await under_way) == 60
        assert mesh.hosts() == ["a", "b", "c"]
        assert not mesh.host_draining.leaving
        assert mesh.messages.said.let_go == []


async def test_a_drain_ends_when_its_host_is_lost(smollm2_path: Path) -> None:
    async with serving(smollm2_path, ROOMY, has_replicas=False) as mesh:
        wanted = await answer(mesh)
        # Its layers are never loaded elsewhere before.
        mesh.driver.starts.clear()
        orders = [asyncio.create_task(mesh.host_draining.drain("c")) for _ in range(2)]
        await mesh.until(lambda: mesh.pipeline.loading)
        assert not any(order.done() for order in orders)
        mesh.members.remove("c")
        mesh.kill(2)
        lost = {"host": "c", "drained": False}
        assert await asyncio.wait_for(asyncio.gather(*orders), 10) == [lost, lost]
        mesh.driver.starts.set()
        await mesh.until(lambda: "c" not in mesh.hosts() and mesh.coordinator.is_ready)
        assert await answer(mesh) == wanted
        # It may join again, and be drained then.
        mesh.members.admit(replace(host("c", 2**30), ray_node_name="c.2"))
        assert await asyncio.wait_for(mesh.host_draining.drain("c"), 20) == {"host": "c", "drained": True}


async def test_drains_are_answered_while_a_repair_waits_for_hosts(smollm2_path: Path) -> None:
    said: list[str] = []
    async with serving(smollm2_path, dict.fromkeys("abc", 1.0), say=said.append) as mesh:
        wanted = await answer(mesh)
        mesh.members.remove("c")
        mesh.kill(2)
        await mesh.until(lambda: said and said[-1].startswith("waiting for hosts: "))
        mesh.members.admit(host("small", 2**20))
        assert await asyncio.wait_for(mesh.host_draining.drain("small"), 20) == {
            "host": "small",
            "drained": True,
        }
        with pytest.raises(ClusterError, match=r"b cannot be drained: "):
            await asyncio.wait_for(mesh.host_draining.drain("b"), 20)
        # One that leaves by itself is told.
        mesh.members.update("a", is_leaving=True)
        await mesh.until(lambda: mesh.messages.said.announced)
        assert "it leaves anyway in 15 s" in mesh.messages.said.announced[0]
        mesh.members.update("a", is_leaving=False)
        assert mesh.messages.said.let_go == ["small"]
        mesh.members.admit(host("d", 2**40))
        await mesh.until(lambda: mesh.coordinator.is_ready)
        assert await answer(mesh) == wanted


class FullHosts:
    """Hosts with less memory than was counted on: processes start there and load nothing.

    Args:
        mesh: The mesh, where each process that starts is noted from now on.
        are_full: Returns whether a host is, from its Ray node and those where processes were started before.
    """

    def __init__(self, mesh: Serving, are_full: Callable[[str, list[str]], bool]) -> None:
        self.tried: list[str] = []
        self._create = mesh.driver.create
        self._are_full = are_full
        mesh.driver.create = self.create  # type: ignore[method-assign]

    async def create(self, kind: type, *arguments: Any, ray_node_name: str, **more: Any) -> InProcessActor:
        actor = await self._create(kind, *arguments, ray_node_name=ray_node_name, **more)
        if self._are_full(ray_node_name, self.tried):

            async def refuse() -> None:
                raise ModelDoesNotFit(f"{ray_node_name} has no room")

            actor.stage.check_memory = refuse  # type: ignore[method-assign]
        self.tried.append(ray_node_name)
        return actor


async def test_a_move_that_fails_on_one_host_goes_to_another(smollm2_path: Path) -> None:
    hosts = dict.fromkeys("abc", 1.1) | dict.fromkeys("de", 9.0)
    # A replica would take over what cannot be loaded.
    async with serving(smollm2_path, hosts, has_replicas=False) as mesh:
        wanted = await answer(mesh)
        full = FullHosts(mesh, lambda node, tried: not tried or node == tried[0])
        under_way = await some_way(mesh)
        await asyncio.wait_for(mesh.host_draining.drain("c"), 60)
        assert await under_way == wanted
        assert sorted(full.tried[:2]) == ["d.1", "e.1"]
        assert mesh.hosts() == ["a", "b", full.tried[1].removesuffix(".1")]
        assert await answer(mesh) == wanted


async def test_a_drain_that_fails_twice_is_given_up_and_the_mesh_serves_on(smollm2_path: Path) -> None:
    phases: list[str] = []
    hosts = dict.fromkeys("abc", 1.1) | {"d": 9.0}
    async with serving(smollm2_path, hosts, say=phases.append, has_replicas=False) as mesh:
        full = FullHosts(mesh, lambda _node, _tried: True)
        under_way = await some_way(mesh)
        with pytest.raises(ClusterError, match=r"c cannot be drained: d\.1 has no room"):
            await asyncio.wait_for(mesh.host_draining.drain("c"), 60)
        assert len(await under_way) == 60
        assert full.tried == ["d.1", "d.1"]
        assert (mesh.hosts(), phases[-1]) == (["a", "b", "c"], "serving")
        assert not mesh.host_draining.leaving
        assert mesh.messages.said.let_go == []


async def test_a_host_that_leaves_by_itself_is_told_and_goes_once_its_layers_fit(smollm2_path: Path) -> None:
    hosts = dict.fromkeys("abc", 1.1) | {"d": 9.0}
    async with serving(smollm2_path, hosts, has_replicas=False) as mesh:
        wanted = await answer(mesh)
        is_full = True
        full = FullHosts(mesh, lambda _node, _tried: is_full)
        mesh.members.update("c", is_leaving=True)
        await mesh.until(lambda: mesh.messages.said.announced)
        assert mesh.messages.said.announced == ["c: d.1 has no room; it leaves anyway in 15 s"]
        assert len(full.tried) == 2
        is_full = False
        await mesh.until(lambda: mesh.messages.said.let_go == ["c"])
        assert mesh.hosts() == ["a", "b", "d"]
        assert await answer(mesh) == wanted


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_host_that_keeps_no_layers_for_another_reason_stays(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_room: bool
) -> None:
    hosts = dict.fromkeys("abc", 1.1) | {"d": 9.0}
    async with serving(smollm2_path, hosts, has_replicas=False) as mesh:
        wanted = await answer(mesh)
        full = FullHosts(mesh, lambda _node, _tried: not has_room)
        monkeypatch.setattr(Member, "keeps_layers", property(lambda member: member.name != "c"))
        mesh.members.update("c", is_ready=True)
        if has_room:
            await mesh.until(lambda: mesh.hosts() == ["a", "b", "d"] and mesh.coordinator.is_ready)
        else:
            await mesh.until(lambda: len(full.tried) == 3)
            assert mesh.hosts() == ["a", "b", "c"]
        assert await answer(mesh) == wanted
        assert mesh.messages.said.let_go == mesh.messages.said.announced == []


async def test_if_need_be_all_is_placed_anew(smollm2_path: Path) -> None:
    # Beside a stage there is no room for a second process, but five more layers find some.
    async with serving(smollm2_path, dict.fromkeys("abc", 1.1)) as mesh:
        wanted = await answer(mesh)
        under_way = await some_way(mesh)
        mesh.members.remove("c")
        mesh.kill(2)
        assert await under_way == wanted
        assert mesh.hosts() == ["a", "b"]


async def test_a_mesh_without_room_says_so_and_heals_when_a_host_joins(smollm2_path: Path) -> None:
    async with serving(smollm2_path, dict.fromkeys("abc", 1.0)) as mesh:
        wanted = await answer(mesh)
        under_way = await some_way(mesh)
        mesh.driver.refuses.add("c.1")
        mesh.members.remove("c")
        mesh.kill(2)
        with pytest.raises(StageFailed, match=r"does not fit|no other host can hold") as caught:
            await under_way
        assert caught.value.retry_after_s
        with pytest.raises(StageFailed):
            await asyncio.wait_for(answer(mesh), 3)
        mesh.members.admit(host("d", 2**40))
        await mesh.until(lambda: mesh.coordinator.is_ready)
        assert await answer(mesh) == wanted
        assert mesh.hosts() == ["a", "b", "d"]


@pytest.fixture
def replaceable(smollm2_path: Path, tmp_path: Path) -> Path:
    """The model in a file of its own."""
    return Path(shutil.copyfile(smollm2_path, tmp_path / "model.gguf"))


def replaced(model: Path) -> Path:
    """Put another model of the same size in its place; returns where the old one is."""
    aside = model.rename(model.with_name("aside.gguf"))
    shutil.copyfile(aside, model)
    with model.open("r+b") as file:
        file.seek(model.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(model.stat().st_size // 2)
        file.write(bytes([byte ^ 4]))
    return aside


async def test_nothing_of_a_replaced_model_gets_into_a_repair_until_it_is_put_back(replaceable: Path) -> None:
    said: list[str] = []
    async with serving(replaceable, dict.fromkeys("abc", 1.1), say=said.append) as mesh:
        wanted = await answer(mesh)
        aside = replaced(replaceable)
        under_way = await some_way(mesh)
        # All has to be placed anew, in parts that were not hashed.
        mesh.members.remove("c")
        mesh.kill(2)
        with pytest.raises(StageFailed, match=r"model\.gguf was changed since it was served"):
            await under_way
        assert said[-1].startswith("waiting for the model: ")
        assert "or put the old file back" in said[-1]
        aside.rename(replaceable)
        await mesh.until(lambda: mesh.coordinator.is_ready)
        assert said[-1] == "serving"
        assert await answer(mesh) == wanted
        assert mesh.hosts() == ["a", "b"]


async def test_a_host_is_not_drained_for_layers_of_a_replaced_model(replaceable: Path) -> None:
    sizes = StageSizes(read_model_facts(replaceable), WORKLOAD)
    first, second, last = (sizes.memory(layers).total_bytes for layers in PARTS)
    # Neither of the others has room for all of its layers. Both get some, in parts that were not hashed.
    room = {"a": first + 0.95 * last, "b": second + 0.95 * last, "c": last}
    shares = {name: num_bytes / stage_bytes(sizes) for name, num_bytes in room.items()}
    async with serving(replaceable, shares) as mesh:
        wanted = await answer(mesh)
        aside = replaced(replaceable)
        under_way = await some_way(mesh)
        with pytest.raises(ClusterError, match=r"c cannot be drained: .*model\.gguf was changed since"):
            await asyncio.wait_for(mesh.host_draining.drain("c"), 60)
        assert await under_way == wanted
        assert mesh.hosts() == ["a", "b", "c"]
        aside.rename(replaceable)
        await asyncio.wait_for(mesh.host_draining.drain("c"), 60)
        assert await answer(mesh) == wanted
        assert "c" not in mesh.hosts()


async def test_what_fails_during_a_repair_is_another_round(smollm2_path: Path) -> None:
    async with serving(smollm2_path, ROOMY) as mesh:
        wanted = await answer(mesh)
        under_way = await some_way(mesh)
        mesh.driver.refuses.add("b.1")
        mesh.kill(1)
        mesh.kill(2)
        assert await under_way == wanted
        assert "b" not in mesh.hosts()
        assert mesh.incidents.repairs.count == 1
        assert len(mesh.incidents.failures) == 2


async def test_an_evicted_host_is_out_at_once(smollm2_path: Path) -> None:
    async with serving(smollm2_path, ROOMY) as mesh:
        wanted = await answer(mesh)
        under_way = await some_way(mesh)
        await mesh.host_draining.evict("a")
        assert await under_way == wanted
        assert "a" not in mesh.hosts()
        (failure,) = mesh.incidents.failures
        assert failure.reason == "its host was evicted"
