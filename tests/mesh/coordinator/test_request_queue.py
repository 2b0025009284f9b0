"""Who is next in the line, who may join it, and when to try again."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.request_queue import HoldTimes, SlotPool
from mesh.util.fair_queue import FairQueue
from spanmesh_proto.errors import Overloaded

CLIENTS = ("ann", "bob", "cy", None)


def rest(queue: FairQueue[str | None, str]) -> list[str | None]:
    return [queue.next() for _ in range(len(queue))]


def test_many_of_one_client_delay_another_by_one_turn() -> None:
    queue: FairQueue[str | None, str] = FairQueue(64)
    for number in range(60):
        queue.add("greedy", f"greedy {number}")
    queue.add("modest", "modest 0")
    queue.add("modest", "modest 1")
    assert rest(queue)[:5] == ["greedy 0", "modest 0", "greedy 1", "modest 1", "greedy 2"]
    assert queue.next() is None


def test_alone_a_client_has_the_whole_line_and_nobody_keeps_another_out() -> None:
    queue: FairQueue[str | None, str] = FairQueue(4)
    for number in range(4):
        assert queue.has_room("greedy")
        queue.add("greedy", f"greedy {number}")
    assert not queue.has_room("greedy")
    assert queue.has_room("modest")
    queue.add("modest", "modest 0")
    # The line is full: nobody adds a second one until it is shorter, and then whoever holds less than half.
    assert not queue.has_room("modest")
    assert [queue.next(), queue.next()] == ["greedy 0", "modest 0"]
    queue.add("modest", "modest 1")
    assert [queue.has_room("greedy"), queue.has_room("modest")] == [False, False]
    assert queue.next() == "greedy 1"
    assert [queue.has_room("greedy"), queue.has_room("modest")] == [False, True]


def test_who_leaves_the_line_holds_nobody_up() -> None:
    queue: FairQueue[str | None, str] = FairQueue(8)
    for item in ("a", "b", "c"):
        queue.add("ann", item)
    queue.add("bob", "d")
    queue.discard("ann", "a")
    queue.discard("bob", "d")
    queue.discard("bob", "d")
    queue.discard("ann", "never there")
    assert (len(queue), queue.num_of("ann"), queue.num_of("bob")) == (2, 2, 0)
    assert rest(queue) == ["b", "c"]


@given(
    most=st.integers(1, 12),
    moves=st.lists(st.tuples(st.sampled_from(["join", "join", "next", "leave"]), st.sampled_from(CLIENTS))),
)
def test_turns_places_and_order(most: int, moves: list[tuple[str, str | None]]) -> None:
    """Against the plainest of models: a list of all who wait."""
    queue: FairQueue[str | None, tuple[str | None, int]] = FairQueue(most)
    waiting: list[tuple[str | None, int]] = []
    passed: Counter[str | None] = Counter()
    for number, (move, client) in enumerate(moves):
        own = [item for item in waiting if item[0] == client]
        if move == "join":
            share = most // max(1, len({each for each, _ in waiting}))
            assert queue.has_room(client) == (not own or (len(waiting) < most and len(own) < share))
            if queue.has_room(client):
                queue.add(client, (client, number))
                waiting.append((client, number))
        elif move == "leave" and own:
            queue.discard(client, own[-1])
            waiting.remove(own[-1])
        elif move == "next":
            served = queue.next()
            if served is None:
                assert not waiting
                continue
            waiting.remove(served)
            assert all(number > served[1] for each, number in waiting if each == served[0])
            others = {each for each, _ in waiting} - {served[0]}
            for other in others:
                passed[other] += 1
                # Every client has its turn before any other has two.
                assert passed[other] < len(CLIENTS)
            passed[served[0]] = 0
        for gone in set(CLIENTS) - {each for each, _ in waiting}:
            passed[gone] = 0
        assert len(queue) == len(waiting) <= most + len(CLIENTS) - 1


@pytest.mark.parametrize(
    ("held_s", "place", "retry_after_s"),
    [([], 3, 5), ([8.0], 1, 2), ([8.0], 9, 18), ([0.01], 1, 1), ([50.0], 64, 60), ([8.0, 16.0], 4, 9)],
)
def test_when_to_try_again_follows_from_how_long_slots_were_held(
    held_s: list[float], place: int, retry_after_s: int
) -> None:
    times = HoldTimes(num_slots=4)
    for each_s in held_s:
        times.add(each_s)
    assert times.retry_after_s([1] * place) == retry_after_s


def test_short_answers_are_told_to_come_back_sooner_than_long_ones() -> None:
    times = HoldTimes(num_slots=4)
    times.add(16.0, max_tokens=1024)
    assert times.retry_after_s([1024] * 8) == 32
    # An eighth of the tokens in an eighth of the time, until it is known better.
    assert times.retry_after_s([128] * 8) == 4
    times.add(0.5, max_tokens=128)
    assert times.retry_after_s([128] * 8) == 1
    assert times.retry_after_s([1024, *[128] * 8]) == 5
    # Longer ones need not use what they may.
    assert times.retry_after_s([4096] * 8) == 32


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def hold(pool: SlotPool, client: str | None, served: list[str | None], leave: asyncio.Event) -> None:
    async with pool.hold(client=client):
        served.append(client)
        await leave.wait()


async def test_slots_go_round_the_clients_and_the_next_one_hears_when_to_come_back() -> None:
    clock = Clock()
    pool = SlotPool(num_slots=1, max_waiting=4, clock_s=clock)
    served: list[str | None] = []
    leave = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for client in ("greedy", "greedy", "greedy", "greedy", "modest"):
            group.create_task(hold(pool, client, served, leave))
        await asyncio.sleep(0)
        assert (pool.num_busy, pool.num_waiting) == (1, 4)
        with pytest.raises(Overloaded, match=r"1 slots.*4 requests wait, 3 of them.*--max-waiting") as caught:
            await hold(pool, "greedy", served, leave)
        assert caught.value.retry_after_s == 5
        clock.now_s = 3.0
        leave.set()
    assert served == ["greedy", "greedy", "modest", "greedy", "greedy"]
    assert (pool.num_busy, pool.num_waiting) == (0, 0)


@pytest.mark.parametrize("when", ["before its turn", "as its turn comes", "as it is let in"])
async def test_whoever_gives_up_waiting_leaves_no_trace(when: str) -> None:
    pool = SlotPool(num_slots=1, max_waiting=4, clock_s=Clock())
    served: list[str | None] = []
    leave, never = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(hold(pool, "ann", served, leave))
    second = asyncio.create_task(hold(pool, "bob", served, never))
    await asyncio.sleep(0)
    if when == "before its turn":
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert pool.num_waiting == 0
    leave.set()
    if when == "as its turn comes":
        # `first` ends before `second` hears of either.
        second.cancel()
    if when == "as it is let in":
        # Here `first` has ended, and `second` has a slot that it does not know of.
        await asyncio.sleep(0)
        assert (first.done(), pool.num_waiting, pool.num_busy) == (True, 0, 1)
        second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert second.cancelled()
    assert (served, pool.num_busy, pool.num_waiting) == (["ann"], 0, 0)
