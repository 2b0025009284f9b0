"""Two models on the same hosts: real stages of both, moved and made anew while both answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from mesh.engine import GenerationRequest
from tests.support.ring_harness import collect
from tests.support.serve_harness import Serving, serving

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("cut_stages")]

REQUEST = GenerationRequest(tuple(range(100, 112)), max_tokens=60)
HOSTS = ("a", "b", "c")


async def answer(mesh: Serving) -> list[int]:
    return (await collect(mesh.coordinator, REQUEST))[0]


async def test_both_heal_when_a_host_of_both_is_lost(smollm2_path: Path) -> None:
    async with (
        serving(smollm2_path, dict.fromkeys(HOSTS, 4.5)) as one,
        serving(smollm2_path, dict.fromkeys(HOSTS, 0.0), beside=one) as two,
    ):
        wanted = await answer(one)
        under_way = [asyncio.create_task(answer(mesh)) for mesh in (one, two)]
        await one.until(lambda: one.coordinator.num_requests and two.coordinator.num_requests)
        one.members.remove("b")
        for mesh in (one, two):
            mesh.kill(1)
        assert [await each for each in under_way] == [wanted, wanted]
        for mesh in (one, two):
            assert "b" not in mesh.hosts()
            # Whichever is noticed first: that the stage is lost, or that its host has left.
            done = mesh.incidents.repairs
            assert done.count + done.moves == 1
        # Nobody counted on the same room twice.
        for member in one.members:
            assert one.allocations.held_bytes(member) <= member.facts.memory_bytes


async def test_a_repair_reckons_with_the_other_model_whose_copies_give_way(smollm2_path: Path) -> None:
    # Room on each host for two stages, and for a third where there is but one.
    async with serving(smollm2_path, dict.fromkeys((*HOSTS, "d"), 3.2)) as one:
        await one.until(lambda: {copy.member.name for copy in one.pipeline.replicas} == {"d"}, 60)
        async with serving(smollm2_path, dict.fromkeys(HOSTS, 0.0), beside=one) as two:
            wanted = await answer(two)
            (d,) = (member for member in one.members if member.name == "d")
            (allocation,) = (each for each in one.allocations if each.pipeline is two.pipeline)
            # Copies do not count as taken for a stage.
            assert allocation.capacity_of(d).others_bytes == 0
            assert allocation.capacity_for_replicas(d).others_bytes > 0
            num_copies = len(one.pipeline.replicas)
            one.members.remove("b")
            two.kill(1)
            one.kill(1)
            assert await answer(two) == await answer(one) == wanted
            assert "b" not in (*one.hosts(), *two.hosts())
            assert len(one.pipeline.replicas) < num_copies
            for member in one.members:
                assert one.allocations.held_bytes(member) <= member.facts.memory_bytes


async def test_a_host_is_let_go_when_neither_needs_it(smollm2_path: Path) -> None:
    async with (
        serving(smollm2_path, dict.fromkeys(HOSTS, 9.0)) as one,
        serving(smollm2_path, dict.fromkeys(HOSTS, 0.0), beside=one) as two,
    ):
        wanted = await answer(one)
        under_way = asyncio.create_task(answer(two))
        assert await asyncio.wait_for(one.host_draining.drain("c"), 60) == {"host": "c", "drained": True}
        assert "c" not in (*one.hosts(), *two.hosts())
        assert one.messages.said.let_go == ["c"]
        assert await under_way == wanted
        # Shown out, a host leaves both at once.
        await one.host_draining.evict("b")
        assert [await answer(mesh) for mesh in (one, two)] == [wanted, wanted]
        for mesh in (one, two):
            assert set(mesh.hosts()) == {"a"}
            reasons = {failure.reason for failure in mesh.incidents.failures}
            assert reasons == {"its host was evicted"}
