"""A link of the lab: nothing early, nothing out of order, and what its conditions say."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbench.lab.link import Link, LinkConditions
from meshbench.lab.network import host_processors


def make_link(delay_ns: int, capacity_bytes: int = 100, **conditions: float) -> Link:
    return Link(LinkConditions(delay_ns / 1e6, **conditions), Random(1).random, capacity_bytes)


def set_delay(link: Link, delay_ns: int) -> None:
    link.conditions = LinkConditions(delay_ns / 1e6)


def test_a_packet_comes_out_after_the_delay_and_not_before() -> None:
    link = make_link(delay_ns=5_000, capacity_bytes=100)
    link.push(b"first", now_ns=1_000)
    link.push(b"second", now_ns=1_500)
    assert link.next_due_ns == 6_000
    assert link.pop_due(5_999) == []
    assert link.pop_due(6_000) == [(6_000, b"first")]
    assert link.pop_due(7_000) == [(6_500, b"second")]
    assert link.next_due_ns is None


def test_a_shorter_delay_lets_no_packet_overtake() -> None:
    link = make_link(delay_ns=20_000, capacity_bytes=100)
    link.push(b"slow", now_ns=0)
    set_delay(link, 5_000)
    link.push(b"fast", now_ns=1_000)
    assert link.pop_due(19_999) == []
    assert [packet for _, packet in link.pop_due(20_000)] == [b"slow", b"fast"]
    link.push(b"alone", now_ns=30_000)
    assert link.next_due_ns == 35_000


def test_a_longer_delay_spares_packets_under_way() -> None:
    link = make_link(delay_ns=5_000, capacity_bytes=100)
    link.push(b"early", now_ns=0)
    set_delay(link, 20_000)
    link.push(b"late", now_ns=0)
    assert link.pop_due(5_000) == [(5_000, b"early")]
    assert link.next_due_ns == 20_000


def test_a_packet_without_room_is_dropped_and_counted() -> None:
    link = make_link(delay_ns=5_000, capacity_bytes=10)
    assert link.push(b"x" * 8, now_ns=0)
    assert not link.push(b"y" * 3, now_ns=0)
    assert link.push(b"z" * 2, now_ns=0)
    assert link.num_dropped == 1
    assert [packet[:1] for _, packet in link.pop_due(5_000)] == [b"x", b"z"]
    assert link.push(b"w" * 10, now_ns=6_000)  # there is room again


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
    link = make_link(delay_ns=10, capacity_bytes=64)
    now_ns = 0
    sent: list[tuple[int, bytes]] = []
    received: list[bytes] = []
    earliest: dict[bytes, int] = {}
    for number, (passed_ns, delay_ns, size_bytes) in enumerate(steps):
        now_ns += passed_ns
        for due_ns, packet in link.pop_due(now_ns):
            assert earliest[packet] <= due_ns <= now_ns
            received.append(packet)
        if delay_ns is not None:
            set_delay(link, delay_ns)
        packet = number.to_bytes(2, "big").ljust(size_bytes, b".")
        earliest[packet] = now_ns + round(1e6 * link.conditions.delay_ms)
        if link.push(packet, now_ns):
            sent.append((number, packet))
        assert sum(len(packet) for _, packet in sent) - sum(map(len, received)) <= 64
    received += [packet for _, packet in link.pop_due(now_ns + 1_000)]
    assert received == [packet for _, packet in sent]
    assert len(sent) + link.num_dropped == len(steps)
    assert len(link) == 0


def test_jitter_is_even_up_to_its_bound_and_keeps_the_order() -> None:
    link = make_link(0, capacity_bytes=1 << 20, jitter_ms=10.0)
    late_ms = []
    for number in range(2000):
        sent_ns = number * 20_000_000  # far apart: none waits for another
        assert link.push(bytes([number % 256]), sent_ns)
        ((due_ns, _),) = link.pop_due(sent_ns + 20_000_000)
        late_ms.append((due_ns - sent_ns) / 1e6)
    assert 0.0 <= min(late_ms) < 0.1
    assert 9.9 < max(late_ms) <= 10.0
    assert 4.7 < sum(late_ms) / len(late_ms) < 5.3
    for number in range(100):
        link.push(bytes([number]), 10**12 + 1000 * number)
    assert [packet[0] for _, packet in link.pop_due(10**13)] == list(range(100))


def test_as_many_packets_are_lost_as_told_and_counted() -> None:
    link = make_link(0, capacity_bytes=1 << 20, loss=0.1)
    arrived = sum(link.push(b"x", 0) for _ in range(5000))
    assert 4350 < arrived < 4650
    assert link.num_dropped == 5000 - arrived
    assert len(link) == arrived


def test_bandwidth_is_what_packets_take_one_after_the_other() -> None:
    link = make_link(1_000_000, capacity_bytes=1 << 20, mbit_per_s=8.0)  # a microsecond a byte
    assert link.push(b"x" * 1000, 0)
    assert link.push(b"y" * 500, 100_000)
    assert link.push(b"z" * 100, 9_000_000)
    assert [due_ns for due_ns, _ in link.pop_due(10**9)] == [2_000_000, 2_500_000, 10_100_000]


def test_a_narrow_link_holds_no_more_than_a_router_would() -> None:
    link = Link(LinkConditions(50.0, mbit_per_s=80.0), Random(1).random)
    num_held = 0
    while link.push(b"x" * 10_000, 0):
        num_held += 1
    # 10 MB a second: a quarter of a second of them.
    assert num_held == 250


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"delay_ms": -1.0}, "delay"),
        ({"jitter_ms": -1.0}, "jitter"),
        ({"loss": 1.0}, "loss"),
        ({"mbit_per_s": 0.0}, "bandwidth"),
    ],
)
def test_conditions_that_cannot_be_are_refused(fields: dict[str, float], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        LinkConditions(**fields)


def test_conditions_are_written_as_they_are() -> None:
    assert str(LinkConditions(5.0)) == "5 ms"
    assert str(LinkConditions(5.0, 2.0, 0.001, 100.0)) == "5 ms, 2 ms jitter, 0.10 % loss, 100 Mbit/s"


@given(st.integers(1, 12), st.integers(1, 12))
def test_processors_are_shared_evenly(num_processors: int, num_hosts: int) -> None:
    available = list(range(10, 10 + num_processors))
    shares = host_processors(available, num_hosts)
    assert len(shares) == num_hosts
    assert {one for share in shares for one in share} == set(available[: max(num_hosts, num_processors)])
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    uses = [sum(one in share for share in shares) for one in available]
    assert max(uses) - min(uses) <= 1
