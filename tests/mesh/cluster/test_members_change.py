"""Waiting for a change among the members: for a while, and until one is cancelled, whatever happens then."""

from __future__ import annotations

import asyncio

import pytest

from mesh.cluster.members import Members


async def test_it_ends_with_the_time_or_with_a_change() -> None:
    members = Members()
    await members.change_within(0.01)
    waiting = asyncio.create_task(members.change_within(60))
    await asyncio.sleep(0)
    members._notify()
    await asyncio.wait_for(waiting, 20)


async def test_who_is_cancelled_as_the_change_comes_is_cancelled() -> None:
    members = Members()

    async def look_again_and_again() -> None:
        while True:
            await members.change_within(60)

    looking = asyncio.create_task(look_again_and_again())
    for num_turns in range(8):
        for _ in range(num_turns):
            await asyncio.sleep(0)
        members._notify()
    await asyncio.sleep(0)
    members._notify()
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(looking, 20)
