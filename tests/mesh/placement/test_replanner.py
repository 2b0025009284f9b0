"""Who takes over lost layers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.placement.memory_estimate import StageSizes
from mesh.placement.planner import StagePlacement, plan
from mesh.placement.replanner import Replan, Replica, can_replan, replan
from spanmesh_proto.errors import MeshError, ModelDoesNotFit, NotEnoughHosts
from stages.layers import LayerRange
from tests.mesh.placement.test_planner import OVERHEAD_BYTES, WORKLOAD, host, models
from tests.mesh.placement.test_planner import model as model_of

if TYPE_CHECKING:
    from mesh.placement.host_capacity import HostCapacity
    from stages.slicing.model_facts import ModelFacts

SIZES = StageSizes(model_of(), WORKLOAD)


def ring(*parts: tuple[str, int, int], sizes: StageSizes = SIZES) -> list[StagePlacement]:
    """Stages by host, first layer and last."""
    ranges = [(name, LayerRange(start, stop)) for name, start, stop in parts]
    return [StagePlacement(name, layers, sizes.memory(layers)) for name, layers in ranges]


THREE = ring(("a", 0, 10), ("b", 10, 20), ("c", 20, 30))


def shown(result: Replan) -> list[str]:
    """`host start-stop`, with `=` before what is kept and `*` before what was a copy."""
    return [
        f"{'=' if stage.kept is not None else '*' if stage.is_replica else ''}{stage.placement.host} "
        f"{stage.placement.layers.start}-{stage.placement.layers.stop}"
        for stage in result.stages
    ]


def test_a_copy_is_the_first_choice_even_beside_a_faster_spare() -> None:
    hosts = [host("a", 2000), host("c", 2000), host("fast", 9000, 90.0), host("spare", 2000, 1.0)]
    result = replan(SIZES, THREE, {1}, hosts, [Replica("spare", LayerRange(10, 20))])
    assert shown(result) == ["=a 0-10", "*spare 10-20", "=c 20-30"]
    assert result.reason == "layers [10, 20) to spare (had a replica)"
    assert not result.dropped


def test_without_a_copy_a_spare_comes_before_the_host_that_had_it_and_that_before_others() -> None:
    hosts = [host("a", 9000, 90.0), host("b", 2000), host("c", 9000), host("spare", 2000, 1.0)]
    assert shown(replan(SIZES, THREE, {1}, hosts))[1] == "spare 10-20"
    assert shown(replan(SIZES, THREE, {1}, hosts[:3]))[1] == "b 10-20"
    assert shown(replan(SIZES, THREE, {1}, [hosts[0], hosts[2]]))[1] == "a 10-20"


def test_lost_stages_do_not_share_a_host_while_another_has_room() -> None:
    hosts = [host("a", 2000), host("x", 9000, 50.0), host("y", 9000, 20.0)]
    assert shown(replan(SIZES, THREE, {1, 2}, hosts)) == ["=a 0-10", "x 10-20", "y 20-30"]


def test_a_copy_of_something_else_gives_way_to_what_is_needed() -> None:
    replica = Replica("spare", LayerRange(0, 10))
    roomy, tight = host("spare", 3000), host("spare", 1500)
    assert not replan(SIZES, THREE, {1}, [roomy], [replica]).dropped
    assert replan(SIZES, THREE, {1}, [tight], [replica]).dropped == (replica,)


def test_layers_that_no_host_can_take_alone_are_shared_out() -> None:
    hosts = [host("a", 1650), host("c", 1000), host("spare", 600)]
    assert shown(replan(SIZES, THREE, {1}, hosts)) == ["=a 0-10", "spare 10-16", "a 16-20", "=c 20-30"]


def test_only_if_nothing_else_helps_the_model_is_placed_anew() -> None:
    # Beside a stage of ten layers there is room for three more, as another process takes its share.
    tight = [host("a", 1500), host("b", 1500)]
    with pytest.raises(ModelDoesNotFit, match=r"layers \[20, 30\) need 1.2 GiB; free are 500.0 MiB on a, "):
        replan(SIZES, THREE, {2}, tight, may_start_over=False)
    anew = replan(SIZES, THREE, {2}, tight)
    assert anew.starts_over
    assert anew.reason.startswith("new placement: no fewer than 2 hosts")
    assert shown(anew) == ["a 0-15", "b 15-30"]


def test_a_new_plan_keeps_what_is_where_it_wants_it() -> None:
    facts = model_of(cuts=(15,))
    sizes = StageSizes(facts, WORKLOAD)
    stages = ring(("a", 0, 15), ("b", 15, 30), sizes=sizes)
    hosts = [host("a", 1500), host("b", 1500)]
    assert shown(replan(sizes, stages, {1}, hosts)) == ["=a 0-15", "b 15-30"]


def test_a_broken_link_moves_nothing() -> None:
    assert shown(replan(SIZES, THREE, (), [])) == ["=a 0-10", "=b 10-20", "=c 20-30"]


def test_no_host_and_no_room_are_told_apart() -> None:
    with pytest.raises(NotEnoughHosts, match="mesh join"):
        replan(SIZES, THREE, {0}, [])
    with pytest.raises(ModelDoesNotFit, match="join more hosts"):
        replan(SIZES, THREE, {0}, [host("a", 100)])


@st.composite
def broken_rings(
    draw: st.DrawFn,
) -> tuple[ModelFacts, list[StagePlacement], set[int], list[HostCapacity], list[Replica]]:
    facts = draw(models())
    roomy = [
        host(f"h{index}", memory_mib, draw(st.floats(1, 100)))
        for index, memory_mib in enumerate(draw(st.lists(st.integers(0, 3000), min_size=2, max_size=5)))
    ]
    count = draw(st.integers(1, min(4, len(facts.allowed_cuts) + 1)))
    try:
        stages = list(plan(facts, roomy, WORKLOAD, num_stages=count).stages)
    except MeshError:
        stages = list(plan(facts, [host("h0", 10**6)], WORKLOAD, num_stages=count).stages)
        roomy[0] = host("h0", 10**6)
    lost = draw(st.sets(st.integers(0, len(stages) - 1), min_size=1))
    usable = draw(st.lists(st.sampled_from(roomy), unique=True))
    replicas = []
    for each in usable:
        left_bytes = each.memory_bytes - sum(
            stage.memory.total_bytes
            for index, stage in enumerate(stages)
            if index not in lost and stage.host == each.name
        )
        for stage in draw(st.lists(st.sampled_from(stages), unique=True)):
            if stage.memory.total_bytes <= left_bytes:
                left_bytes -= stage.memory.total_bytes
                replicas.append(Replica(each.name, stage.layers))
    return facts, stages, lost, usable, replicas


@given(broken=broken_rings(), may_start_over=st.booleans())
def test_whether_lost_stages_find_a_place_is_known_without_a_plan(
    broken: tuple[ModelFacts, list[StagePlacement], set[int], list[HostCapacity], list[Replica]],
    *,
    may_start_over: bool,
) -> None:
    facts, stages, lost, hosts, _ = broken
    sizes = StageSizes(facts, WORKLOAD)
    try:
        replan(sizes, stages, lost, hosts, may_start_over=may_start_over)
        is_possible = True
    except (ModelDoesNotFit, NotEnoughHosts):
        is_possible = False
    assert can_replan(sizes, stages, lost, hosts, may_start_over=may_start_over) is is_possible


@given(broken=broken_rings(), may_start_over=st.booleans())
def test_every_repair_is_sound(
    broken: tuple[ModelFacts, list[StagePlacement], set[int], list[HostCapacity], list[Replica]],
    *,
    may_start_over: bool,
) -> None:
    facts, stages, lost, hosts, replicas = broken
    sizes = StageSizes(facts, WORKLOAD)
    try:
        result = replan(sizes, stages, lost, hosts, replicas, may_start_over=may_start_over)
    except (ModelDoesNotFit, NotEnoughHosts):
        # No one host has room for all that is lost.
        needed = OVERHEAD_BYTES * 4 + sum(stages[index].memory.total_bytes for index in lost)
        survivors = [stage for index, stage in enumerate(stages) if index not in lost]
        for each in hosts:
            taken = sum(stage.memory.total_bytes for stage in survivors if stage.host == each.name)
            assert each.memory_bytes - taken < needed
        return
    new = [stage.placement for stage in result.stages]
    # Every layer once, in order, cut where the model may be cut.
    assert [new[0].layers.start, new[-1].layers.stop] == [0, facts.n_layers]
    assert all(left.layers.stop == right.layers.start for left, right in itertools.pairwise(new))
    assert {stage.layers.start for stage in new[1:]} <= set(facts.allowed_cuts)
    # What goes on is the very stage that survived; unless all was placed anew, all that survived goes on.
    kept = [stage.kept for stage in result.stages if stage.kept is not None]
    assert not set(kept) & lost
    assert len(set(kept)) == len(kept)
    for stage in result.stages:
        if stage.kept is not None:
            assert stage.placement == stages[stage.kept]
    if not result.starts_over:
        assert set(kept) == set(range(len(stages))) - lost
    else:
        assert may_start_over
    # A copy is used once, and is none of those that were dropped.
    used = [
        Replica(stage.placement.host, stage.placement.layers) for stage in result.stages if stage.is_replica
    ]
    assert set(used) <= set(replicas)
    assert not set(used) & set(result.dropped)
    assert set(result.dropped) <= set(replicas)
    # Memory is never exceeded, by stages and by copies that stay.
    staying = [replica for replica in replicas if replica not in used and replica not in result.dropped]
    for each in hosts:
        taken = sum(stage.memory.total_bytes for stage in new if stage.host == each.name)
        taken += sum(
            sizes.memory(replica.layers).total_bytes for replica in staying if replica.host == each.name
        )
        assert taken <= each.memory_bytes
    # What is not on a usable host survived where it is.
    assert all(
        stage.kept is not None or stage.placement.host in {each.name for each in hosts}
        for stage in result.stages
    )
