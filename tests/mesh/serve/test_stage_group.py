"""Work on several stages at once."""

import asyncio
import gc
from functools import partial
from typing import Any

import pytest

from mesh.serve.pipeline import attributing, run_concurrently
from spanmesh_proto.errors import StageFailed

HANDLE: Any = object()


async def test_the_stage_that_failed_is_named_and_ends_the_others() -> None:
    ended: list[int] = []
    blamed: list[object] = []

    async def work(number: int) -> None:
        try:
            await asyncio.sleep(0 if number == 1 else 60)
        finally:
            ended.append(number)
        raise StageFailed("it is gone")

    def blame(handle: object, error: Exception) -> None:
        blamed.extend((handle, error.args[0]))

    with pytest.raises(StageFailed, match="it is gone"):
        await run_concurrently(attributing(partial(work, number), HANDLE, blame) for number in range(3))
    assert sorted(ended) == [0, 1, 2]
    assert blamed == [HANDLE, "it is gone"]


async def test_work_that_is_cancelled_before_it_begins_is_never_made(
    recwarn: pytest.WarningsRecorder,
) -> None:
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)

    whole = asyncio.create_task(run_concurrently([attributing(work, HANDLE, lambda *_: None)]))
    await asyncio.sleep(0)
    whole.cancel()
    with pytest.raises(asyncio.CancelledError):
        await whole
    gc.collect()
    assert not begun
    assert not recwarn.list
