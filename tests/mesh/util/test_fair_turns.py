"""Turns of clients at something that does a few things at a time."""

from __future__ import annotations

import asyncio

import pytest

from mesh.util.fair_turns import FairTurns
from spanmesh_proto.errors import Overloaded


class Work:
    """Two at a time, in the order in which they begin."""

    def __init__(self) -> None:
        self.turns = FairTurns(2, 4, "pictures", retry_after_s=2)
        self.begun: list[str] = []
        self.may_end = asyncio.Event()
        self.num_running = self.most_running = 0

    async def do(self, name: str, client: str) -> None:
        async with self.turns.turn(client):
            self.begun.append(name)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
            try:
                await self.may_end.wait()
            finally:
                self.num_running -= 1


async def test_clients_take_turns_and_few_at_a_time() -> None:
    work = Work()
    tasks = [asyncio.create_task(work.do(f"a{number}", "a")) for number in range(5)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(work.do("b0", "b")))
    await asyncio.sleep(0.01)
    assert work.begun == ["a0", "a1"]
    with pytest.raises(Overloaded, match="4 pictures wait, 3 of them with this API key: try again in 2 s"):
        await work.do("a5", "a")
    work.may_end.set()
    await asyncio.gather(*tasks)
    assert work.begun == ["a0", "a1", "a2", "b0", "a3", "a4"]
    assert (work.most_running, work.num_running) == (2, 0)


async def test_who_leaves_gives_its_turn_to_the_next() -> None:
    work = Work()
    tasks = [asyncio.create_task(work.do(name, name)) for name in "abcd"]
    await asyncio.sleep(0.01)
    # One that runs and one that waits.
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.sleep(0.01)
    assert work.begun == ["a", "b", "d"]
    work.may_end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    await work.do("e", "e")
    assert work.num_running == 0
