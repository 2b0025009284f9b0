"""What a head writes down for the next: until it is written, and before an order is answered."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from mesh.serve.head_state import HeadStateFile, HeadStateWriter
from spanmesh_proto.errors import ClusterError
from tests.mesh.serve.test_head_state import STATE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from mesh.serve.head_state import HeadState


class Kept:
    """A succession that keeps its file up to date.

    Attributes:
        state: What it is to write.
    """

    def __init__(self, file: HeadStateFile, *, patience_s: float) -> None:
        self.state = STATE
        self.state_writer = HeadStateWriter(file, None, STATE.term, patience_s=patience_s)

    def read(self) -> HeadState:
        return self.state

    def change(self) -> HeadState:
        self.state = dataclasses.replace(self.state, join_port=self.state.join_port + 1)
        return self.state


@pytest.fixture
def file(tmp_path: Path) -> Iterator[HeadStateFile]:
    with HeadStateFile(tmp_path / "head.json") as opened:
        yield opened


class Obstacle:
    """A folder where the parts of a file go: nothing can be written, by root neither."""

    def __init__(self, path: Path) -> None:
        self.add, self.remove = path.mkdir, path.rmdir


@pytest.fixture
def obstacle(file: HeadStateFile, monkeypatch: pytest.MonkeyPatch) -> Obstacle:
    monkeypatch.setattr("secrets.token_hex", lambda _num_bytes: "0000")
    return Obstacle(file.path.with_name(f".{file.path.name}.0000.part"))


@asynccontextmanager
async def kept(file: HeadStateFile, *, patience_s: float = 10.0) -> AsyncIterator[Kept]:
    keeping = Kept(file, patience_s=patience_s)
    task = asyncio.create_task(keeping.state_writer.keep_written(keeping.read))
    try:
        yield keeping
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until_written(file: HeadStateFile, state: HeadState, within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while file.load() != state:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_what_could_not_be_written_is_written_later(file: HeadStateFile, obstacle: Obstacle) -> None:
    async with kept(file) as keeping:
        await until_written(file, STATE)
        obstacle.add()
        changed = keeping.change()
        async with asyncio.timeout(10):
            while keeping.state_writer.failure is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert file.load() == STATE
        obstacle.remove()
        # Nothing changes any more, and nobody asks.
        await until_written(file, changed)
        async with asyncio.timeout(10):
            while keeping.state_writer.failure is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


class Full(HeadStateFile):
    """On a disk that has no room for the next two attempts."""

    num_refused = 0

    def save(self, state: HeadState) -> None:
        if state != STATE and self.num_refused < 2:
            self.num_refused += 1
            raise OSError(28, "No space left on device")
        super().save(state)


async def test_a_write_that_fails_twice_is_tried_a_third_time(tmp_path: Path) -> None:
    with Full(tmp_path / "full.json") as file:
        async with kept(file) as keeping:
            await until_written(file, STATE)
            changed = keeping.change()
            await keeping.state_writer.written()
            assert file.load() == changed
            assert file.num_refused == 2
            assert keeping.state_writer.failure is None


async def test_what_is_answered_is_written_first(file: HeadStateFile) -> None:
    async with kept(file) as keeping:
        await keeping.state_writer.written()
        for _ in range(20):
            changed = keeping.change()
            await keeping.state_writer.written()
            assert file.load() == changed


async def test_who_waits_in_vain_hears_why_and_what_to_do(file: HeadStateFile, obstacle: Obstacle) -> None:
    async with kept(file, patience_s=0.3) as keeping:
        await until_written(file, STATE)
        obstacle.add()
        changed = keeping.change()
        with pytest.raises(ClusterError, match=rf"not saved .*exists.*free space for {file.path}"):
            await keeping.state_writer.written()
        obstacle.remove()
        await until_written(file, changed)


async def test_who_waits_when_the_head_ends_hears_that_it_is_not_written(
    file: HeadStateFile, obstacle: Obstacle
) -> None:
    async with kept(file) as keeping:
        await until_written(file, STATE)
        obstacle.add()
        changed = keeping.change()
        asked = asyncio.create_task(keeping.state_writer.written())
        await asyncio.sleep(0.05)
        assert not asked.done()
    with pytest.raises(ClusterError, match=r"not saved .*after a crash of this one would.*is ending"):
        await asked
    assert file.load() == STATE
    obstacle.remove()
    await keeping.state_writer.written()
    assert file.load() == changed


async def test_a_state_that_changes_back_after_a_failed_write_is_no_failure(
    file: HeadStateFile, obstacle: Obstacle
) -> None:
    async with kept(file) as keeping:
        await until_written(file, STATE)
        obstacle.add()
        keeping.change()
        async with asyncio.timeout(10):
            while keeping.state_writer.failure is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        keeping.state = STATE
        obstacle.remove()
        await keeping.state_writer.written()
        assert keeping.state_writer.failure is None
        assert file.load() == STATE


async def test_without_a_file_nobody_waits() -> None:
    await HeadStateWriter(None, None, 1).written()
