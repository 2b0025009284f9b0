"""Which hosts hold a model, against every set of them in every order."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.placement.gpu_layers import memory_on, read_time
from mesh.placement.host_assignment import StageTable, assign_all, find_assignment
from mesh.placement.host_capacity import Gpu, HostCapacity
from mesh.placement.memory_estimate import StageSizes, Workload
from stages.layers import LayerRange
from tests.mesh.placement.test_planner import WORKLOAD, host, model, models

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stages.slicing.model_facts import ModelFacts

rooms = st.lists(
    st.tuples(st.integers(0, 900), st.sampled_from([5.0, 20.0, 60.0])), min_size=1, max_size=5
).map(lambda pairs: [host(f"h{index}", *pair) for index, pair in enumerate(pairs)])


def _splits(sizes: StageSizes, hosts: Sequence[HostCapacity]) -> Iterator[tuple[float, ...]]:
    """Read times of every way to share layers out among these hosts in this order."""
    for cuts in itertools.combinations(sizes.edges[1:-1], len(hosts) - 1):
        parts = [LayerRange(*pair) for pair in itertools.pairwise((0, *cuts, sizes.model.n_layers))]
        memories = [memory_on(sizes, part, at) for part, at in zip(parts, hosts, strict=True)]
        if all(sizes.model.may_be_stage(part) for part in parts) and None not in memories:
            yield tuple(
                read_time(sizes, part, memory, at)
                for part, memory, at in zip(parts, memories, hosts, strict=True)
                if memory is not None
            )


def _fewest(sizes: StageSizes, hosts: Sequence[HostCapacity]) -> int | None:
    return next(
        (
            count
            for count in range(1, len(hosts) + 1)
            if any(True for order in itertools.permutations(hosts, count) for _ in _splits(sizes, order))
        ),
        None,
    )


@given(
    models(),
    rooms,
    st.one_of(st.just({}), st.just({2: "taken for another", 3: "likewise"})),
)
@settings(deadline=None, max_examples=60)
def test_as_few_hosts_as_any_order_allows(
    facts: ModelFacts, hosts: list[HostCapacity], refused_lengths: dict[int, str]
) -> None:
    facts = replace(facts, refused_lengths=refused_lengths)
    sizes = StageSizes(facts, WORKLOAD)
    found, fewest = find_assignment(StageTable(sizes), hosts), _fewest(sizes, hosts)
    if fewest is None:
        assert found is None
        return
    assert found is not None
    assert found.least_stages == fewest
    ways = list(_splits(sizes, found.hosts))
    # Nobody else would share the layers out better among them.
    assert found.slowest_ns == pytest.approx(min(map(max, ways)))
    assert any(found.round_ns == pytest.approx(sum(way)) for way in ways)
    if len(found.hosts) == fewest:
        in_order = [hosts.index(seat) for seat in found.hosts]
        assert found.is_in_order == (in_order == sorted(in_order))
        if not found.is_in_order:
            assert not any(
                True for chosen in itertools.combinations(hosts, fewest) for _ in _splits(sizes, chosen)
            )


@given(models(), rooms)
@settings(deadline=None, max_examples=60)
def test_all_of_some_hosts_are_seated_whenever_some_order_allows_it(
    facts: ModelFacts, hosts: list[HostCapacity]
) -> None:
    sizes = StageSizes(facts, WORKLOAD)
    found = assign_all(StageTable(sizes), hosts)
    orders = [order for order in itertools.permutations(hosts) if any(True for _ in _splits(sizes, order))]
    assert (found is None) == (not orders)
    if found is not None:
        assert found.hosts == orders[0]


def test_hosts_more_than_can_be_told_apart_still_find_their_order() -> None:
    # Sixteen hosts with room for 1 to 16 layers each; the last holds the head, too, and must come last.
    facts = model(136, layer_mib=10, head_mib=1000)
    hosts = [host(f"h{index}", 10 * index + 1000 * (index == 16)) for index in range(1, 17)]
    table = StageTable(StageSizes(facts, WORKLOAD))
    found = find_assignment(table, hosts)
    assert found is not None
    assert [len(part) for part in found.layers] == list(range(1, 17))
    assert find_assignment(table, hosts[1:]) is None


def test_the_first_good_plan_is_taken_when_time_is_up() -> None:
    table = StageTable(StageSizes(model(), WORKLOAD))
    # A fast host that holds little makes a slow one hold much.
    hosts = [host("fast", 100, 90.0), host("a", 1500, 40.0), host("b", 1500, 40.0), host("slow", 2900, 5.0)]
    patient, hasty = find_assignment(table, hosts), find_assignment(table, hosts, is_time_up=lambda: True)
    assert patient is not None
    assert hasty is not None
    assert [seat.name for seat in patient.hosts] == ["a", "b"]
    assert [seat.name for seat in hasty.hosts] == ["fast", "slow"]
    assert patient.beats(hasty)


@st.composite
def odd_models(draw: st.DrawFn) -> ModelFacts:
    """With everything that sizes depend on."""
    n_layers = draw(st.integers(1, 12))
    per_layer = st.lists(st.integers(0, 10**6), min_size=n_layers, max_size=n_layers).map(tuple)
    return replace(
        model(n_layers, head_mib=1, embedding_mib=1),
        n_vocab=1000,
        row_width=100,
        layer_bytes=draw(per_layer),
        is_tied=draw(st.booleans()),
        kv_widths=draw(per_layer),
        state_widths=draw(st.one_of(st.just(()), per_layer.filter(any))),
        packing_bytes=draw(st.one_of(st.just(()), per_layer)),
        head_packing_bytes=draw(st.integers(0, 10**6)),
        has_windows=draw(st.booleans()),
        num_blanks=draw(st.integers(0, 2)),
        embeds_everywhere=draw(st.booleans()),
        refused_lengths=draw(st.sampled_from([{}, {2: "taken for another"}])),
    )


@given(
    odd_models(),
    st.builds(
        Workload, st.integers(1, 4096), st.integers(1, 8), st.sampled_from(["f32", "q8_0"]), st.booleans()
    ),
    st.booleans(),
)
@settings(deadline=None)
def test_a_table_says_of_all_stages_what_sizes_say_of_each(
    facts: ModelFacts,
    workload: Workload,
    with_gpu: bool,  # noqa: FBT001 - drawn
) -> None:
    sizes = StageSizes(facts, workload)
    totals = [
        sizes.memory(LayerRange(*pair)).total_bytes
        for pair in itertools.combinations(range(facts.n_layers + 1), 2)
    ]
    gpus = (
        (Gpu("CUDA0", "", sizes.memory(sizes.whole).total_bytes // 2 + 2**29, 0, 100.0),) if with_gpu else ()
    )
    # One that some stages fit on, to the byte.
    at = HostCapacity("h", sorted(totals)[len(totals) // 2], 7.0, gpus=gpus)
    table = StageTable(sizes)
    times = table.times(at)
    for (row, start), (column, stop) in itertools.product(enumerate(table.edges), repeat=2):
        memory = (
            memory_on(sizes, LayerRange(start, stop), at)
            if start < stop and facts.may_be_stage(LayerRange(start, stop))
            else None
        )
        expected = np.inf if memory is None else read_time(sizes, LayerRange(start, stop), memory, at)
        assert times[row, column] == expected


def test_of_equal_hosts_one_is_taken_with_which_the_order_can_be_kept() -> None:
    table = StageTable(StageSizes(model(2, layer_mib=9), WORKLOAD))
    found = find_assignment(table, [host("a", 1, 5.0), host("b", 9, 5.0), host("c", 1, 5.0)])
    assert found is not None
    assert [seat.name for seat in found.hosts] == ["b", "c"]
    assert found.is_in_order
