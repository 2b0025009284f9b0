"""Requests to a model that is unloaded have a while to end, and no longer."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from mesh.coordinator.coordinator import PendingEngine
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from mesh.serve.served_model import drained
from spanmesh_proto.errors import ModelNotFound, StageFailed
from tests.support.fake_stage import FakeRuntime
from tests.support.repairable_ring import RepairableRing, serving
from tests.support.ring_harness import collect

if TYPE_CHECKING:
    from mesh.serve.served_model import ServedModel

OPTIONS = CoordinatorOptions(128, 2, FakeRuntime.max_rows, 64)
SHORT, LONG = GenerationRequest((1, 2, 3), max_tokens=4), GenerationRequest((4, 5), max_tokens=120)
WAIT_S, STEP_S = 2.0, 0.02


def slowly(_stage: int, _spans: object) -> None:
    """A batch of any stage takes as long as with a model: 120 tokens take seven seconds."""
    time.sleep(STEP_S)


async def test_those_that_end_in_time_are_whole_and_the_others_are_ended() -> None:
    async with serving(RepairableRing(slowly), OPTIONS) as coordinator:
        engine = PendingEngine(OPTIONS.context_length)
        engine.coordinator = coordinator
        model = cast("ServedModel", SimpleNamespace(name="tiny", engine=engine))
        short, long = (asyncio.create_task(collect(coordinator, each)) for each in (SHORT, LONG))
        async with asyncio.timeout(20):
            while coordinator.num_requests < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        start_s = time.monotonic()
        # As soon as both have ended, or after that long.
        assert await drained(model, WAIT_S) == 1
        assert time.monotonic() - start_s >= WAIT_S
        assert len((await short)[0]) == SHORT.max_tokens
        with pytest.raises(StageFailed, match="the model tiny was unloaded"):
            await long
        with pytest.raises(ModelNotFound):
            engine.generate(SHORT)


async def test_where_nothing_runs_nobody_waits() -> None:
    async with serving(RepairableRing(), OPTIONS) as coordinator:
        engine = PendingEngine(OPTIONS.context_length)
        model = cast("ServedModel", SimpleNamespace(name="tiny", engine=engine))
        assert await drained(model, 60) == 0
        engine.coordinator = coordinator
        assert await asyncio.wait_for(drained(model, 60), 5) == 0
