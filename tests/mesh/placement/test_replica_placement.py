"""What spares load ahead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mesh.placement.memory_estimate import StageSizes
from mesh.placement.planner import StagePlacement
from mesh.placement.replanner import Replica, next_replica, replicated_layers
from stages.layers import LayerRange
from tests.mesh.placement.test_planner import WORKLOAD, host, model

SIZES = StageSizes(model(), WORKLOAD)
RANGES = (LayerRange(0, 10), LayerRange(10, 22), LayerRange(22, 30))
RING = [
    StagePlacement(name, layers, SIZES.memory(layers)) for name, layers in zip("abc", RANGES, strict=True)
]
BUSY = [host(name, 9000) for name in "abc"]


def all_copies(hosts: list[tuple[str, int]]) -> list[Replica]:
    spares = [host(name, memory_mib) for name, memory_mib in hosts]
    replicas: list[Replica] = []
    while (replica := next_replica(SIZES, RING, [*BUSY, *spares], replicas)) is not None:
        replicas.append(replica)
    return replicas


def test_the_largest_stage_comes_first_and_all_follow_where_there_is_room() -> None:
    assert [replica.layers for replica in all_copies([("x", 9000)])] == [RANGES[1], RANGES[0], RANGES[2]]


def test_a_small_spare_takes_what_it_can_hold() -> None:
    assert all_copies([("x", 1100)]) == [Replica("x", RANGES[0])]
    assert all_copies([("x", 700)]) == []


def test_two_spares_first_see_to_it_that_everything_is_there_once() -> None:
    replicas = all_copies([("x", 1300), ("y", 1300)])
    assert [replica.layers for replica in replicas] == [RANGES[1], RANGES[0]]
    assert len({replica.host for replica in replicas}) == 2


def test_nothing_is_copied_more_than_twice() -> None:
    replicas = all_copies([("x", 9000), ("y", 9000), ("z", 9000)])
    assert sorted(replica.layers for replica in replicas) == sorted(RANGES * 2)


def test_hosts_with_a_stage_get_no_copy() -> None:
    assert next_replica(SIZES, RING, BUSY, []) is None


@given(st.lists(st.integers(0, 6000), max_size=4))
def test_copies_never_exceed_memory_and_are_never_the_same_twice(memory_mib: list[int]) -> None:
    hosts = [(f"h{index}", size) for index, size in enumerate(memory_mib)]
    replicas = all_copies(hosts)
    assert len(set(replicas)) == len(replicas)
    for name, size in hosts:
        taken = sum(SIZES.memory(replica.layers).total_bytes for replica in replicas if replica.host == name)
        assert taken <= host(name, size).memory_bytes


@given(st.lists(st.integers(0, 6000), max_size=4), st.permutations(RANGES))
def test_what_gets_a_replica_is_known_without_placing_them_one_by_one(
    memory_mib: list[int], layers: list[LayerRange]
) -> None:
    hosts = [*BUSY, *(host(f"h{index}", size) for index, size in enumerate(memory_mib))]
    ring = [StagePlacement(name, each, SIZES.memory(each)) for name, each in zip("abc", layers, strict=True)]
    replicas: list[Replica] = []
    while (replica := next_replica(SIZES, ring, hosts, replicas)) is not None:
        replicas.append(replica)
    assert replicated_layers(SIZES, ring, hosts) == {replica.layers for replica in replicas}
