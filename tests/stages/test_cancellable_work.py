"""Blocking work of the mesh: it waits behind nothing that clients keep busy, and ends with its task."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from mesh.cluster.membership_server import StageSender
from mesh.serve.head_state import HeadStateFile, HeadStateWriter
from mesh.serve.planning import plan_in_thread
from mesh.serve.stage_factory import ServedFiles
from mesh.util.tasks import entered_in_thread
from spanmesh_proto import membership_pb2 as wire
from stages.cancellable_work import Abandoned, CancellableWork, in_own_thread
from stages.weights.fetch import RateLimit
from stages.weights.hashing import stamps_of
from stages.weights.virtual_stages import StageCache
from tests.mesh.serve.test_head_state import STATE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@asynccontextmanager
async def shared_threads_busy() -> AsyncIterator[None]:
    """All threads that `asyncio.to_thread` has are busy in the block, as a flood of requests keeps them."""
    is_over = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = [loop.run_in_executor(None, is_over.wait) for _ in range(3)]
    try:
        yield
    finally:
        is_over.set()
        await asyncio.gather(*busy)


class _Bytes:
    size_bytes = 3 * 2**20

    def read(self, at: int, count: int) -> bytes:
        return bytes(count) if at < self.size_bytes else b""

    def close(self) -> None:
        pass


async def test_weights_plans_and_state_wait_behind_no_request(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    path = tmp_path / "head.json"
    async with shared_threads_busy(), asyncio.timeout(20):
        sender = StageSender(StageCache(tmp_path), RateLimit(None))
        sent = [len(data) async for data in sender.send(wire.FetchRequest(), _Bytes())]
        assert sum(sent) == _Bytes.size_bytes
        assert not await ServedFiles(model, stamps_of([model])).are_touched()
        assert await plan_in_thread(lambda is_time_up: is_time_up()) is False
        async with entered_in_thread(HeadStateFile(path)) as file:
            writer = HeadStateWriter(file, None, STATE.term)
            keeping = asyncio.create_task(writer.keep_written(lambda: STATE))
            await asyncio.sleep(0)
            await writer.written()
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            assert file.load() == STATE


async def test_a_cancellation_waits_until_the_thread_has_ended() -> None:
    work, begun, steps = CancellableWork(), threading.Event(), []

    def step_by_step() -> None:
        begun.set()
        try:
            while True:
                work.check()
                steps.append("step")
        except Abandoned:
            steps.append("end")
            raise

    task = asyncio.create_task(work.run(step_by_step))
    await in_own_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps[-1] == "end"


async def test_errors_and_results_come_back_and_threads_end() -> None:
    before = threading.active_count()
    assert await in_own_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_own_thread(divmod, 7, 0)
    async with asyncio.timeout(20):
        while threading.active_count() > before:  # noqa: ASYNC110 - nothing tells that a thread has ended
            await asyncio.sleep(0.01)
