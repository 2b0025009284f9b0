"""Budget of body bytes: what is held, who waits, turns, hang-ups."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.api.bodies import MOST_PICTURE_BODY_BYTES, BodyBudget, BodyHold
from spanmesh_proto.errors import Overloaded


def budget_of(max_wait_s: float = 60.0) -> BodyBudget:
    """Bodies of up to 10 bytes: two of a client, four in all."""
    return BodyBudget(body_bytes=lambda: 10, client_bodies=2, total_bodies=4, max_wait_s=max_wait_s)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_client_waits_for_its_own_bodies_and_not_for_those_of_others() -> None:
    budget = budget_of()
    first, second, third = (BodyHold(budget, "ann") for _ in range(3))
    await first.take(10)
    await second.take(10)
    waiting = asyncio.create_task(third.take(1))
    await settled()
    assert not waiting.done()
    assert budget.is_wanted
    await BodyHold(budget, "bob").take(10)
    first.keep(0)
    await waiting
    assert (budget.num_bytes, budget.is_wanted) == (21, False)


async def test_all_together_are_bounded_and_have_turns() -> None:
    budget = budget_of()
    holds = [BodyHold(budget, client) for client in ("ann", "ann", "bob", "bob")]
    for hold in holds:
        await hold.take(10)
    order: list[str] = []

    async def take(client: str) -> None:
        await BodyHold(budget, client).take(10)
        order.append(client)

    tasks = [asyncio.create_task(take(client)) for client in ("cid", "cid", "dan")]
    await settled()
    for hold in holds:
        hold.keep(0)
        await settled()
    await asyncio.gather(*tasks)
    assert order == ["cid", "dan", "cid"]


async def test_a_hang_up_gives_back_what_it_waited_for_and_what_it_held() -> None:
    budget = budget_of()
    holds = [BodyHold(budget, "ann") for _ in range(2)]
    for hold in holds:
        await hold.take(10)
    gone = asyncio.create_task(BodyHold(budget, "ann").take(10))
    granted = asyncio.create_task(BodyHold(budget, "ann").take(10))
    await settled()
    gone.cancel()
    await settled()
    assert gone.cancelled()
    # The one that gets its turn is cancelled before it knows.
    holds[0].keep(0)
    granted.cancel()
    await settled()
    assert granted.cancelled()
    holds[1].keep(0)
    assert (budget.num_bytes, budget.is_wanted) == (0, False)


async def test_waits_have_an_end() -> None:
    budget = budget_of(max_wait_s=0.01)
    holds = [BodyHold(budget, "ann") for _ in range(3)]
    await holds[0].take(10)
    await holds[1].take(10)
    with pytest.raises(
        Overloaded, match=r"with this API key that are not answered yet hold 20 bytes of bodies.*again in 5 s"
    ):
        await holds[2].take(10)
    for _ in range(2):
        await BodyHold(budget, "bob").take(10)
    with pytest.raises(
        Overloaded, match=r"bodies of other requests take all of the memory.*try again in 5 s"
    ):
        await BodyHold(budget, "eve").take(10)
    assert not budget.is_wanted


async def test_bodies_with_pictures_are_more_for_a_client_and_no_more_in_all() -> None:
    size = MOST_PICTURE_BODY_BYTES
    budget = BodyBudget(body_bytes=lambda: size, max_wait_s=0.01)
    for _ in range(4):
        await BodyHold(budget, "ann").take(size)
    with pytest.raises(Overloaded, match="with this API key that are not answered yet"):
        await BodyHold(budget, "ann").take(size)
    for _ in range(4):
        await BodyHold(budget, "bob").take(size)
    with pytest.raises(Overloaded, match="bodies of other requests"):
        await BodyHold(budget, "eve").take(1)
    assert budget.num_bytes == 8 * size


async def test_requests_that_wait_are_bounded() -> None:
    budget = budget_of()
    for _ in range(2):
        await BodyHold(budget, "ann").take(10)
    waiting = [asyncio.create_task(BodyHold(budget, "ann").take(1)) for _ in range(256)]
    await settled()
    with pytest.raises(Overloaded, match="256 requests wait"):
        await BodyHold(budget, "ann").take(1)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not budget.is_wanted


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ann", "bob", None]), st.integers(0, 10), st.integers(0, 5)), max_size=60
    )
)
def test_no_more_is_held_than_permitted_and_nobody_waits_for_nothing(
    steps: list[tuple[str | None, int, int]],
) -> None:
    async def play() -> None:
        budget = budget_of()
        held: list[tuple[str | None, asyncio.Task[None], BodyHold]] = []
        for client, num_bytes, drop in steps:
            hold = BodyHold(budget, client)
            held.append((client, asyncio.create_task(hold.take(num_bytes)), hold))
            await settled()
            if drop < len(held):
                _, task, other = held.pop(drop)
                task.cancel()
                await settled()
                other.keep(0)
                await settled()
            assert budget.num_bytes <= 40
            for each in ("ann", "bob"):
                assert sum(hold._num_bytes for client, _, hold in held if client == each) <= 20
        for _, task, hold in held:
            task.cancel()
            await settled()
            hold.keep(0)
        assert (budget.num_bytes, budget.is_wanted) == (0, False)

    asyncio.run(play())
