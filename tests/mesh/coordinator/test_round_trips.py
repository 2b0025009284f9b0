"""Where the time of a round trip went: by clocks that are apart, and over a real ring."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.stage_streams import ClockOffset
from mesh.coordinator.telemetry import RoundTrips
from mesh.engine import GenerationRequest
from mesh.status import RoundTripStatus
from spanmesh_proto import windows_pb2 as wire
from tests.support.fake_stage import fake_ring
from tests.support.ring_harness import running_coordinator, running_services


def test_the_question_that_came_back_soonest_tells_the_time() -> None:
    clock = ClockOffset()
    assert (clock.offset_us, clock.rtt_us) == (None, None)
    # 5 ms each way, the clock 1 s ahead; two answers waited on their way back.
    clock.add(0, 1_005_000, 90_000)
    clock.add(100_000, 1_105_000, 110_000)
    clock.add(200_000, 1_205_000, 230_000)
    assert (clock.offset_us, clock.rtt_us) == (1_000_000, 10_000)
    for number in range(16):
        clock.add(number, 2_000_000, number + 20_000)
    assert clock.rtt_us == 20_000


@given(
    hops=st.lists(st.integers(0, 50_000), min_size=2, max_size=6),
    offsets=st.lists(st.integers(-(2**40), 2**40), min_size=5, max_size=5),
    data=st.data(),
)
def test_hops_queues_and_stages_are_found_whatever_the_clocks_show(
    hops: list[int], offsets: list[int], data: st.DataObject
) -> None:
    num_stages = len(hops) - 1
    offsets = [2**41 + offset for offset in offsets[:num_stages]]
    now_us = sent_us = 2**42
    times, took = [], []
    for hop, offset in zip(hops, offsets, strict=False):
        queue_us, compute_us = data.draw(st.tuples(st.integers(0, 9_000), st.integers(1, 90_000)))
        now_us += hop
        times.append(
            wire.StageTime(queue_us=queue_us, compute_us=compute_us, num_rows=1, arrived_us=now_us + offset)
        )
        took.append((queue_us / 1000, compute_us / 1000))
        now_us += queue_us + compute_us
    trips = RoundTrips(num_stages)
    trips.add(times, offsets, sent_us, now_us + hops[-1])
    found = trips.status()
    assert found.windows == 1
    assert found.wire_ms == tuple(hop / 1000 for hop in hops)
    assert list(zip(found.queue_ms, found.compute_ms, strict=True)) == took


@given(
    arrivals=st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3),
    offset=st.integers(-(2**41), 2**41),
)
def test_whatever_a_stage_says_sums_only_grow(arrivals: list[int], offset: int) -> None:
    trips = RoundTrips(3)
    for _ in range(2):
        before = trips.status()
        times = [
            wire.StageTime(queue_us=5, compute_us=70, num_rows=1, arrived_us=arrived) for arrived in arrivals
        ]
        trips.add(times, [offset, 0, -offset], 1_000, 2_000)
        after = trips.status()
        assert all(new >= old for new, old in zip(after.wire_ms, before.wire_ms, strict=True))
        assert sum(after.wire_ms) - sum(before.wire_ms) <= 1.0


@given(
    stages=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 900)), min_size=1, max_size=4),
    errors=st.lists(st.integers(-3_000, 3_000), min_size=4, max_size=4),
    hop=st.integers(0, 2_000),
)
def test_a_clock_that_is_off_moves_time_between_hops_only(
    stages: list[tuple[int, int]], errors: list[int], hop: int
) -> None:
    now_us, times = 10_000, []
    for queue_us, compute_us in stages:
        now_us += hop
        times.append(wire.StageTime(queue_us=queue_us, compute_us=compute_us, num_rows=1, arrived_us=now_us))
        now_us += queue_us + compute_us
    trips = RoundTrips(len(stages))
    trips.add(times, errors[: len(stages)], 10_000, now_us + hop)
    found = trips.status()
    total_ms = sum((*found.wire_ms, *found.queue_ms, *found.compute_ms))
    assert total_ms == pytest.approx((now_us + hop - 10_000) / 1000)


@pytest.mark.parametrize(
    ("time", "offset"),
    [
        (wire.StageTime(num_rows=1, arrived_us=7), None),
        (wire.StageTime(num_rows=0, arrived_us=7), 0),
        (wire.StageTime(num_rows=1), 0),
    ],
    ids=["no clock yet", "sent again", "an older stage"],
)
def test_what_nobody_knows_is_left_out(time: wire.StageTime, offset: int | None) -> None:
    trips = RoundTrips(1)
    trips.add([time], [offset], 0, 10)
    trips.add([], [], 0, 10)
    assert trips.status() == RoundTripStatus(wire_ms=(0, 0), queue_ms=(0,), compute_ms=(0,))


async def test_a_ring_tells_where_the_time_of_its_windows_went() -> None:
    async with (
        running_services(fake_ring()) as stages,
        running_coordinator(stages, context_length=64, num_slots=2) as coordinator,
    ):
        async with asyncio.timeout(20):
            while any(stage.rtt_ms is None for stage in coordinator.status().stages):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        started_s = asyncio.get_running_loop().time()
        async for _ in coordinator.generate(GenerationRequest((1, 2, 3), 24)):
            pass
        elapsed_ms = (asyncio.get_running_loop().time() - started_s) * 1000
        status = coordinator.status()
        trips = status.round_trips
        assert trips is not None
        assert trips.windows == 23
        assert len(trips.wire_ms) == len(status.stages) + 1
        total_ms = sum((*trips.wire_ms, *trips.queue_ms, *trips.compute_ms))
        assert 0 < total_ms <= elapsed_ms
        assert trips.sent_bytes > 23 * 4
        assert trips.received_bytes > 23 * 4
        stats = await coordinator.stage_stats()
        assert all(each.resident_bytes > 2**20 for each in stats)
        assert [each.num_sent_bytes > 0 for each in stats] == [True] * (len(stats) - 1) + [False]
