from hypothesis import given
from hypothesis import strategies as st

from mesh.lab.router import DelayQueue


def test_a_packet_comes_out_after_the_delay_and_not_before() -> None:
    queue = DelayQueue(delay_ns=5_000, capacity_bytes=100)
    queue.push(b"first", now_ns=1_000)
    queue.push(b"second", now_ns=1_500)
    assert queue.next_due_ns == 6_000
    assert queue.pop_due(5_999) == []
    assert queue.pop_due(6_000) == [(6_000, b"first")]
    assert queue.pop_due(7_000) == [(6_500, b"second")]
    assert queue.next_due_ns is None


def test_a_shorter_delay_lets_no_packet_overtake() -> None:
    queue = DelayQueue(delay_ns=20_000, capacity_bytes=100)
    queue.push(b"slow", now_ns=0)
    queue.delay_ns = 5_000
    queue.push(b"fast", now_ns=1_000)
    assert queue.pop_due(19_999) == []
    assert [packet for _, packet in queue.pop_due(20_000)] == [b"slow", b"fast"]
    queue.push(b"alone", now_ns=30_000)
    assert queue.next_due_ns == 35_000


def test_a_longer_delay_spares_packets_under_way() -> None:
    queue = DelayQueue(delay_ns=5_000, capacity_bytes=100)
    queue.push(b"early", now_ns=0)
    queue.delay_ns = 20_000
    queue.push(b"late", now_ns=0)
    assert queue.pop_due(5_000) == [(5_000, b"early")]
    assert queue.next_due_ns == 20_000


def test_a_packet_without_room_is_dropped_and_counted() -> None:
    queue = DelayQueue(delay_ns=5_000, capacity_bytes=10)
    assert queue.push(b"x" * 8, now_ns=0)
    assert not queue.push(b"y" * 3, now_ns=0)
    assert queue.push(b"z" * 2, now_ns=0)
    assert queue.num_dropped == 1
    assert [packet[:1] for _, packet in queue.pop_due(5_000)] == [b"x", b"z"]
    assert queue.push(b"w" * 10, now_ns=6_000)  # there is room again


@given(
    st.lists(
        st.tuples(
            st.integers(0, 50),  # time that passes before the step
            st.one_of(st.none(), st.integers(0, 40)),  # a new delay, or none
            st.integers(1, 30),  # size of a packet
        ),
        max_size=60,
    )
)
def test_order_is_kept_memory_bounded_and_nothing_early(
    steps: list[tuple[int, int | None, int]],
) -> None:
    queue = DelayQueue(delay_ns=10, capacity_bytes=64)
    now_ns = 0
    sent: list[tuple[int, bytes]] = []
    received: list[bytes] = []
    earliest: dict[bytes, int] = {}
    for number, (passed_ns, delay_ns, size_bytes) in enumerate(steps):
        now_ns += passed_ns
        for due_ns, packet in queue.pop_due(now_ns):
            assert earliest[packet] <= due_ns <= now_ns
            received.append(packet)
        if delay_ns is not None:
            queue.delay_ns = delay_ns
        packet = number.to_bytes(2, "big").ljust(size_bytes, b".")
        earliest[packet] = now_ns + queue.delay_ns
        if queue.push(packet, now_ns):
            sent.append((number, packet))
        assert sum(len(packet) for _, packet in sent) - sum(map(len, received)) <= 64
    received += [packet for _, packet in queue.pop_due(now_ns + 1_000)]
    assert received == [packet for _, packet in sent]
    assert len(sent) + queue.num_dropped == len(steps)
    assert len(queue) == 0
