"""A mesh with a topology fails closed: real stages come back where they were, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mesh.placement.topology import LockedStage, Topology
from spanmesh_proto.errors import ClusterError, StageFailed
from tests.mesh.serve.test_supervisor import answer, some_way
from tests.support.serve_harness import PARTS, host, serving

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("cut_stages")]

LOCKED = Topology(tuple(LockedStage(name, layers) for name, layers in zip("abc", PARTS, strict=True)))
ROOMY = {"a": 9.0, "b": 9.0, "c": 9.0, "spare": 9.0}


async def test_a_lost_stage_is_loaded_again_on_its_own_host_whoever_has_room(smollm2_path: Path) -> None:
    async with serving(smollm2_path, ROOMY, topology=LOCKED) as mesh:
        wanted = await answer(mesh)
        under_way = await some_way(mesh)
        num_created = mesh.driver.num_created
        mesh.kill(1)
        assert await under_way == wanted
        assert mesh.hosts() == ["a", "b", "c"]
        # Loaded once more, not taken from a copy.
        assert mesh.driver.num_created == num_created + 1
        assert mesh.pipeline.replicas == []


async def test_without_its_host_nobody_serves_until_it_is_back(smollm2_path: Path) -> None:
    async with serving(smollm2_path, ROOMY, topology=LOCKED) as mesh:
        wanted = await answer(mesh)
        member = mesh.members.find("b")
        assert member is not None
        under_way = await some_way(mesh)
        mesh.members.remove("b")
        mesh.kill(1)
        with pytest.raises(StageFailed, match=r"locks layers \[10, 20\) to host b") as refused:
            await under_way
        assert refused.value.retry_after_s
        again = host("b", member.facts.memory_bytes)
        mesh.members.admit(again)
        await mesh.until(lambda: mesh.coordinator.is_ready)
        assert mesh.hosts() == ["a", "b", "c"]
        assert await answer(mesh) == wanted


async def test_a_host_that_layers_are_locked_to_cannot_be_drained(smollm2_path: Path) -> None:
    async with serving(smollm2_path, ROOMY, topology=LOCKED) as mesh:
        with pytest.raises(ClusterError, match="b cannot be drained: --topology locks layers"):
            await mesh.host_draining.drain("b")
        assert mesh.hosts() == ["a", "b", "c"]
        assert await answer(mesh)
