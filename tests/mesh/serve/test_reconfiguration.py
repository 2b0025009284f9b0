"""Replicas that were to be part of a ring, or to be ended, when its stages could not be loaded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mesh.cluster.members import Members
from mesh.placement.planner import StagePlacement
from mesh.placement.replanner import NewStage, Replan, Replica
from mesh.serve.allocations import HostAllocations
from mesh.serve.pipeline import Pipeline, log_stage_error
from mesh.serve.reconfiguration import PlacementExecutor
from mesh.serve.stage_handle import StageHandle
from spanmesh_proto.errors import StageFailed
from stages.layers import LayerRange
from stages.transport.hidden_codec import HiddenType
from tests.support.serve_harness import host

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mesh.cluster.certificates import Authority
    from mesh.cluster.ray_driver import RayDriver
    from mesh.serve.reconfiguration import Maker
    from stages.runtime.process_memory import StageMemory
    from stages.serving.actor import StageConfig

LAYERS = (LayerRange(0, 10), LayerRange(10, 20))
MEMORY = cast("StageMemory", SimpleNamespace(total_bytes=0))


class Processes:
    """Processes of replicas, which answer nothing.

    Attributes:
        ended: Names of their hosts, once they are ended.
    """

    def __init__(self) -> None:
        self.ended: list[str] = []

    def kill(self, actor: Any) -> None:
        self.ended.append(actor.host)

    def replica(self, name: str, layers: LayerRange) -> StageHandle:
        handle = StageHandle(
            cast("RayDriver", self),
            cast("Authority", None),
            cast("StageConfig", SimpleNamespace(layers=layers, hidden_type=HiddenType.F32)),
            host(name, 2**30),
            on_transfer=lambda *_: None,
        )

        async def stop() -> None:
            await asyncio.Event().wait()

        handle._actor = SimpleNamespace(host=name, stop=SimpleNamespace(remote=stop))
        handle.is_loaded = True
        return handle


class NothingToMake:
    async def describe(self, stages: Iterable[tuple[str, LayerRange]]) -> None:
        assert not list(stages)


@pytest.fixture
def processes() -> Processes:
    return Processes()


@pytest.fixture
def pipeline(processes: Processes) -> Pipeline:
    """With a replica of the first of two stages; that of the second is gone."""
    pipeline = Pipeline()
    pipeline.replicas.append(processes.replica("a", LAYERS[0]))
    return pipeline


@pytest.fixture
def executor(pipeline: Pipeline) -> PlacementExecutor:
    allocation = HostAllocations(lambda _member: False).open("model", pipeline)
    return PlacementExecutor(cast("Maker", NothingToMake()), allocation, Members())


def placements() -> list[StagePlacement]:
    return [StagePlacement(name, layers, MEMORY) for name, layers in zip("ab", LAYERS, strict=True)]


async def test_a_replica_is_one_again_if_another_is_gone(
    executor: PlacementExecutor, pipeline: Pipeline, processes: Processes
) -> None:
    (replica,) = pipeline.replicas
    both = Replan(tuple(NewStage(each, is_replica=True) for each in placements()), (), "")
    with pytest.raises(StageFailed, match="on b is lost"):
        await executor.load_stages(both, (HiddenType.F32,) * 2, log_stage_error)
    assert pipeline.replicas == [replica]
    assert pipeline.intended == ()
    assert processes.ended == []


async def test_a_replica_whose_memory_is_needed_is_ended_even_if_another_is_gone(
    executor: PlacementExecutor, pipeline: Pipeline, processes: Processes
) -> None:
    dropped = tuple(Replica(each.host, each.layers) for each in placements())
    with pytest.raises(StageFailed, match="on b is lost"):
        await executor.load_stages(Replan((), dropped, ""), (), log_stage_error)
    assert pipeline.replicas == []
    assert processes.ended == ["a"]


async def test_a_replica_whose_end_is_no_longer_waited_for_is_ended(
    executor: PlacementExecutor, pipeline: Pipeline, processes: Processes
) -> None:
    decision = Replan((), (Replica("a", LAYERS[0]),), "")
    loading = asyncio.create_task(executor.load_stages(decision, (), log_stage_error))
    while pipeline.replicas:  # noqa: ASYNC110
        await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert processes.ended == ["a"]
