"""Who gets which layers."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.placement.host_capacity import HostCapacity
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.placement.planner import Plan, even_out_noise, plan, remedies
from spanmesh_proto.errors import ModelDoesNotFit, NotEnoughHosts, UncuttableModel
from stages.layers import LayerRange
from stages.slicing.model_facts import ModelFacts

MIB = 2**20
WORKLOAD = Workload(ctx_size=1000, num_slots=2)
# Caches come in whole multiples of 256 positions.
NUM_CELLS = 2048


def model(
    n_layers: int = 30,
    *,
    layer_mib: int = 100,
    head_mib: int = 0,
    embedding_mib: int = 0,
    kv_width: int = 0,
    cuts: tuple[int, ...] | None = None,
    refused_cuts: dict[int, str] | None = None,
    refused_lengths: dict[int, str] | None = None,
) -> ModelFacts:
    """A model of equal layers."""
    return ModelFacts(
        path=Path("model.gguf"),
        architecture="llama",
        name="model",
        n_layers=n_layers,
        n_embd=64,
        n_vocab=0,
        n_ctx_train=2048,
        file_bytes=n_layers * layer_mib * MIB,
        layer_bytes=(layer_mib * MIB,) * n_layers,
        embedding_bytes=embedding_mib * MIB,
        head_bytes=head_mib * MIB,
        is_tied=False,
        kv_widths=(kv_width,) * n_layers,
        head_widths=(64, 64),
        row_width=0,
        has_windows=False,
        allowed_cuts=tuple(range(1, n_layers)) if cuts is None else cuts,
        refused_cuts=refused_cuts or {},
        refused_lengths=refused_lengths or {},
    )


# Of any stage of such a model, as it has no vocabulary.
OVERHEAD_BYTES = StageSizes(model(2, layer_mib=0), WORKLOAD).memory(LayerRange(0, 1)).total_bytes


def host(name: str, memory_mib: int, speed_gb_per_s: float = 20.0) -> HostCapacity:
    """Memory on top of what a stage takes anyway."""
    return HostCapacity(name, memory_mib * MIB + OVERHEAD_BYTES, speed_gb_per_s)


def sizes(result: Plan) -> list[tuple[str, int]]:
    return [(stage.host, len(stage.layers)) for stage in result.stages]


def test_one_host_that_suffices_gets_all_and_the_plan_says_so() -> None:
    result = plan(model(), [host("a", 3000), host("b", 9000)], WORKLOAD)
    assert sizes(result) == [("a", 30)]
    assert "host a can hold the whole model" in result.reason


def test_the_fastest_host_that_suffices_is_chosen() -> None:
    hosts = [host("small", 100, 90.0), host("slow", 9000, 10.0), host("fast", 9000, 40.0)]
    assert sizes(plan(model(), hosts, WORKLOAD)) == [("fast", 30)]


def test_equal_hosts_get_equal_shares_though_measured_speeds_differ_a_little() -> None:
    hosts = [host("a", 1500, 20.0), host("b", 1500, 23.0), host("c", 1500, 18.0)]
    result = plan(model(), hosts, WORKLOAD, num_stages=3)
    assert sizes(result) == [("a", 10), ("b", 10), ("c", 10)]


def test_a_host_twice_as_fast_gets_twice_the_layers() -> None:
    hosts = [host("a", 9000, 40.0), host("b", 9000, 20.0)]
    assert sizes(plan(model(), hosts, WORKLOAD, num_stages=2)) == [("a", 20), ("b", 10)]


def test_memory_limits_what_speed_would_give() -> None:
    hosts = [host("a", 800, 90.0), host("b", 9000, 20.0)]
    assert sizes(plan(model(), hosts, WORKLOAD, num_stages=2)) == [("a", 8), ("b", 22)]


def test_the_tail_holds_fewer_layers_because_it_reads_the_head() -> None:
    hosts = [host("a", 9000), host("b", 9000)]
    assert sizes(plan(model(head_mib=1000), hosts, WORKLOAD, num_stages=2)) == [("a", 20), ("b", 10)]


def test_no_more_hosts_than_needed_are_used() -> None:
    hosts = [host(name, 1600) for name in "abcd"]
    result = plan(model(), hosts, WORKLOAD)
    assert sizes(result) == [("a", 15), ("b", 15)]
    assert "no fewer than 2 hosts" in result.reason


def test_hosts_are_reordered_when_only_so_the_head_finds_room() -> None:
    hosts = [host("roomy", 3300), host("small", 1100)]
    assert sizes(plan(model(head_mib=1200), hosts, WORKLOAD, num_stages=2))[-1][0] == "roomy"


def test_several_stages_on_one_host_share_its_memory() -> None:
    assert sizes(plan(model(), [host("a", 9000)], WORKLOAD, num_stages=2)) == [("a", 15), ("a", 15)]
    with pytest.raises(ModelDoesNotFit):
        plan(model(), [host("a", 3000)], WORKLOAD, num_stages=2)


def test_a_split_by_hand_is_kept() -> None:
    hosts = [host("a", 9000, 10.0), host("b", 9000, 90.0), host("c", 9000)]
    result = plan(model(), hosts, WORKLOAD, split=(5, 20, 5))
    assert [len(stage.layers) for stage in result.stages] == [5, 20, 5]


@pytest.mark.parametrize("split", [(10, 10), (30, 0), (-1, 31), (10, 10, 11)])
def test_a_split_that_does_not_add_up_is_refused(split: tuple[int, ...]) -> None:
    with pytest.raises(UncuttableModel, match="has 30"):
        plan(model(), [host("a", 9000)], WORKLOAD, split=split)


def test_a_split_at_a_place_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(UncuttableModel, match="cannot be cut at layer 7"):
        plan(model(cuts=(10, 20)), [host("a", 90000)], WORKLOAD, split=(7, 23))


def test_only_allowed_cuts_are_used() -> None:
    hosts = [host("a", 9000), host("b", 9000)]
    assert sizes(plan(model(cuts=(4, 28)), hosts, WORKLOAD, num_stages=2)) == [("a", 4), ("b", 26)]


@pytest.mark.parametrize(("cuts", "num_stages"), [((), 2), ((5,), 3), (None, 31), (None, 0)])
def test_more_stages_than_the_model_allows_are_refused(cuts: tuple[int, ...] | None, num_stages: int) -> None:
    with pytest.raises(UncuttableModel, match=f"not {num_stages}"):
        plan(model(cuts=cuts), [host("a", 90000)], WORKLOAD, num_stages=num_stages)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelDoesNotFit) as caught:
        plan(model(kv_width=512), [host("a", 1000), HostCapacity("b", 600 * MIB, 20.0, 70 * MIB)], WORKLOAD)
    message = caught.value.message
    assert "2.9 GiB for weights" in message
    assert "60.0 MiB for 2 x 1000 positions in f16" in message
    assert "192.0 MiB for the process of each stage" in message
    assert "1.2 GiB on a" in message
    assert "600.0 MiB on b beside 70.0 MiB for the draft model" in message
    assert message.endswith("; join more hosts")


@given(
    st.integers(1, 2000),
    st.builds(Workload, st.integers(1, 4096), st.integers(1, 8), st.sampled_from(["f32", "f16", "q4_0"])),
)
@settings(deadline=None)
def test_what_is_said_to_make_a_model_fit_does_and_no_more_would(room_mib: int, workload: Workload) -> None:
    facts, hosts = model(2, layer_mib=10, kv_width=8192), [host("a", room_mib)]

    def refusal(of: Workload) -> str:
        try:
            plan(facts, hosts, of)
        except ModelDoesNotFit as error:
            return error.message
        return ""

    said = dict(re.findall(r"--(ctx-size|parallel|kv-type) (\w+)", refusal(workload)))
    if "kv-type" in said:
        assert not refusal(replace(workload, kv_type=said["kv-type"]))
    ctx_size = int(said.get("ctx-size", 0))
    if ctx_size:
        assert not refusal(replace(workload, ctx_size=ctx_size))
    num_slots = int(said.get("parallel", 0))
    if num_slots:
        assert not refusal(replace(workload, num_slots=num_slots))
    if refusal(workload):
        assert refusal(replace(workload, ctx_size=min(ctx_size + 256, workload.ctx_size)))
        assert refusal(replace(workload, num_slots=min(num_slots + 1, workload.num_slots)))
        assert "kv-type" in said or workload.kv_type == "q4_0" or refusal(replace(workload, kv_type="q8_0"))


def test_no_host_at_all_is_said_plainly() -> None:
    with pytest.raises(NotEnoughHosts, match="mesh join"):
        plan(model(), [], WORKLOAD)


def test_speeds_within_noise_of_the_fastest_are_one_group() -> None:
    speeds = [100.0, 76.0, 74.0, 10.0, 9.0]
    even = even_out_noise([HostCapacity(str(speed), 1, speed) for speed in speeds])
    assert [host.speed_gb_per_s for host in even] == [76.0, 76.0, 74.0, 9.0, 9.0]
    assert [host.name for host in even] == [str(speed) for speed in speeds]


hosts_strategy = st.lists(
    st.builds(
        lambda memory_mib, speed: (memory_mib, speed),
        st.integers(0, 3000),
        st.floats(0, 500, allow_nan=False),
    ),
    min_size=1,
    max_size=4,
).map(lambda pairs: [host(f"h{index}", *pair) for index, pair in enumerate(pairs)])


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    n_layers = draw(st.integers(1, 16))
    cuts = draw(st.sets(st.integers(1, n_layers - 1)) if n_layers > 1 else st.just(set[int]()))
    return model(
        n_layers,
        layer_mib=draw(st.integers(1, 300)),
        head_mib=draw(st.integers(0, 500)),
        embedding_mib=draw(st.integers(0, 500)),
        kv_width=draw(st.integers(0, 2048)),
        cuts=tuple(sorted(cuts)),
    )


@given(models(), hosts_strategy, st.one_of(st.none(), st.integers(1, 6)))
@settings(deadline=None)
def test_every_plan_is_sound(facts: ModelFacts, hosts: list[HostCapacity], num_stages: int | None) -> None:
    try:
        result = plan(facts, hosts, WORKLOAD, num_stages=num_stages)
    except (ModelDoesNotFit, UncuttableModel):
        return
    stages = result.stages
    # Every layer once, in order.
    assert stages[0].layers.start == 0
    assert stages[-1].layers.stop == facts.n_layers
    assert all(left.layers.stop == right.layers.start for left, right in itertools.pairwise(stages))
    assert {stage.layers.start for stage in stages[1:]} <= set(facts.allowed_cuts)
    assert num_stages is None or len(stages) == num_stages
    # Never over memory.
    memory = {host.name: host.memory_bytes for host in hosts}
    for name, memory_bytes in memory.items():
        taken_bytes = sum(stage.memory.total_bytes for stage in stages if stage.host == name)
        assert taken_bytes <= memory_bytes
    # Weights are counted once, and stages of one host lie side by side.
    assert sum(stage.memory.weight_bytes for stage in stages) == (
        sum(facts.layer_bytes) + facts.embedding_bytes + facts.head_bytes
    )
    assert len(list(itertools.groupby(stage.host for stage in stages))) == len(
        {stage.host for stage in stages}
    )


@given(models(), hosts_strategy)
@settings(deadline=None)
def test_what_one_host_can_hold_is_never_split(facts: ModelFacts, hosts: list[HostCapacity]) -> None:
    needed = sum(facts.layer_bytes) + facts.embedding_bytes + facts.head_bytes + OVERHEAD_BYTES
    needed += sum(facts.kv_widths) * 2 * NUM_CELLS
    if max(host.memory_bytes for host in hosts) >= needed:
        assert len(plan(facts, hosts, WORKLOAD).stages) == 1


@given(models(), st.integers(1, 4))
@settings(deadline=None)
def test_no_other_split_has_a_faster_slowest_stage(facts: ModelFacts, num_stages: int) -> None:
    if num_stages > len(facts.allowed_cuts) + 1:
        return
    hosts = [host(f"h{index}", 10**6, 20.0 * 2**index) for index in range(num_stages)]

    def slowest_s(cuts: tuple[int, ...]) -> float:
        edges = (0, *cuts, facts.n_layers)
        reads = [sum(facts.layer_bytes[start:stop]) for start, stop in itertools.pairwise(edges)]
        reads[-1] += facts.head_bytes
        return max(read / at.speed_gb_per_s for read, at in zip(reads, hosts, strict=True))

    result = plan(facts, hosts, WORKLOAD, num_stages=num_stages)
    ours = slowest_s(tuple(stage.layers.start for stage in result.stages[1:]))
    best = min(map(slowest_s, itertools.combinations(facts.allowed_cuts, num_stages - 1)))
    assert ours <= best * (1 + 1e-6)


def test_no_stage_has_a_number_of_layers_that_llama_cpp_takes_for_another_model() -> None:
    facts = model(30, refused_lengths={10: "ten are another model", 15: "fifteen as well"})
    three = plan(facts, [host(name, 1500) for name in "abc"], WORKLOAD, num_stages=3)
    lengths = [len(stage.layers) for stage in three.stages]
    assert sum(lengths) == 30
    assert 10 not in lengths
    with pytest.raises(UncuttableModel, match="no stage of model can have 10 layers: ten are another model"):
        plan(facts, [host(name, 1500) for name in "abc"], WORKLOAD, split=[10, 9, 11])
    # The whole model may.
    whole = model(10, refused_lengths={10: "ten are another model"})
    assert sizes(plan(whole, [host("a", 3000)], WORKLOAD)) == [("a", 10)]


def test_a_number_of_stages_that_lengths_rule_out_is_refused_for_that() -> None:
    facts = model(12, cuts=(4, 8), refused_lengths={4: "four are another model"})
    assert facts.stage_counts == {1}
    with pytest.raises(UncuttableModel, match="into 1 to 1 stages, not 3: four are another model"):
        plan(facts, [host("a", 9000)], WORKLOAD, num_stages=3)
    facts = model(16, cuts=(4, 8), refused_lengths={4: "four are another model"})
    assert facts.stage_counts == {1, 2}
    assert sizes(plan(facts, [host("a", 9000)], WORKLOAD, num_stages=2)) == [("a", 8), ("a", 8)]


def test_a_model_that_cannot_be_cut_runs_on_one_host_and_the_plan_says_why() -> None:
    facts = model(4, cuts=(), refused_cuts=dict.fromkeys(range(1, 4), "it runs in loops"))
    result = plan(facts, [host("a", 10), host("b", 900)], WORKLOAD)
    assert sizes(result) == [("b", 4)]
    assert result.reason == "llama runs on one host, b: it runs in loops"
    with pytest.raises(ModelDoesNotFit, match="join a larger one: it cannot be cut, it runs in loops"):
        plan(facts, [host("a", 10), host("b", 300)], WORKLOAD)
    with pytest.raises(UncuttableModel, match="into 1 to 1 stages, not 2: it runs in loops"):
        plan(facts, [host("b", 900)], WORKLOAD, num_stages=2)
    with pytest.raises(UncuttableModel, match="cannot be cut at layer 2: it runs in loops"):
        plan(facts, [host("b", 900)], WORKLOAD, split=[2, 2])


def test_fewer_checkpoints_are_a_remedy_for_models_with_recurrent_layers() -> None:
    recurrent = replace(model(), can_trim=False)
    workload = Workload(ctx_size=256, num_slots=2, num_checkpoints=8)

    def fits(other: Workload) -> bool:
        return other.num_states <= 10

    assert remedies(recurrent, workload, fits) == ["--checkpoints 4", "--parallel 1"]
    assert remedies(model(), replace(workload, num_checkpoints=0), lambda _other: False) == []
