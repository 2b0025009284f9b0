"""How layers are shared out between a host's processor and its GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.placement.gpu_layers import ALL, GPU_PROCESS_BYTES, memory_on, read_time
from mesh.placement.host_capacity import Gpu, HostCapacity
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.placement.planner import plan
from mesh.placement.replanner import next_replica, replan
from spanmesh_proto.errors import ModelDoesNotFit
from stages.layers import LayerRange
from tests.mesh.placement.test_planner import MIB, OVERHEAD_BYTES, WORKLOAD
from tests.mesh.placement.test_planner import model as model_of

if TYPE_CHECKING:
    from stages.runtime.process_memory import StageMemory

WHOLE = LayerRange(0, 30)
SIZES = StageSizes(model_of(), WORKLOAD)
# What a stage of such a model takes of a GPU beside its layers.
BESIDE_BYTES = SIZES.on_gpu.compute_bytes(WHOLE) + GPU_PROCESS_BYTES


def gpu(name: str, layers: float, speed: float = 900.0, *, shares: bool = False) -> Gpu:
    """With room for so many layers of 100 MiB."""
    return Gpu(name, "a GPU", int(layers * 100 * MIB) + BESIDE_BYTES, 2**40, speed, shares)


def host(*gpus: Gpu, memory_mib: int = 4000, gpu_layers: int | None = None, name: str = "a") -> HostCapacity:
    return HostCapacity(name, memory_mib * MIB + OVERHEAD_BYTES, 20.0, gpus=gpus, gpu_layers=gpu_layers)


def placed(capacity: HostCapacity, layers: LayerRange = WHOLE, sizes: StageSizes = SIZES) -> StageMemory:
    memory = memory_on(sizes, layers, capacity)
    assert memory is not None
    return memory


def test_layers_go_to_a_gpu_that_has_room_for_them_all() -> None:
    memory = placed(host(gpu("CUDA0", 30)))
    assert memory.gpu_layers == (("CUDA0", 30),)
    # What is left to the processor is its process and its buffers.
    assert memory.loading_bytes == memory.buffer_bytes
    assert "of which 2.9 GiB on CUDA0" in str(memory)


def test_the_last_layers_go_to_a_gpu_that_has_room_for_some() -> None:
    memory = placed(host(gpu("CUDA0", 12.5)))
    assert memory.gpu_layers == (("CUDA0", 12),)
    assert memory.loading_bytes - memory.buffer_bytes == 18 * 100 * MIB


def test_the_head_goes_with_the_last_layer_and_the_embedding_stays() -> None:
    sizes = StageSizes(model_of(head_mib=500, embedding_mib=300), WORKLOAD)
    memory = placed(host(gpu("CUDA0", 15)), sizes=sizes)
    assert memory.gpu_layers == (("CUDA0", 10),)
    assert memory.gpus[0].weight_bytes == (10 * 100 + 500) * MIB
    assert memory.loading_bytes - memory.buffer_bytes == (20 * 100 + 300) * MIB
    # A stage that is not the tail has no head to bring along.
    assert placed(host(gpu("CUDA0", 15)), LayerRange(0, 20), sizes).gpu_layers == (("CUDA0", 15),)


def test_a_tied_head_on_a_gpu_does_not_take_the_embedding_from_the_processor() -> None:
    tied = replace(model_of(head_mib=300, embedding_mib=300), is_tied=True)
    memory = placed(host(gpu("CUDA0", 40)), sizes=StageSizes(tied, WORKLOAD))
    assert memory.gpus[0].weight_bytes == 3300 * MIB
    assert memory.loading_bytes - memory.buffer_bytes == 300 * MIB


def test_the_fastest_gpu_is_filled_first_and_layers_stay_in_order() -> None:
    memory = placed(host(gpu("CUDA0", 5, 900), gpu("CUDA1", 10, 1800), gpu("CUDA2", 7, 900)))
    # From the last layer down: 10 on the fastest, 7 on the roomier of the others, 5 on the last.
    assert memory.gpu_layers == (("CUDA0", 5), ("CUDA2", 7), ("CUDA1", 10))
    assert memory.loading_bytes - memory.buffer_bytes == 800 * MIB


def test_the_user_s_number_is_met_or_the_host_is_left_out() -> None:
    assert placed(host(gpu("CUDA0", 30), gpu_layers=7)).gpu_layers == (("CUDA0", 7),)
    assert placed(host(gpu("CUDA0", 30), gpu_layers=70)).gpu_layers == (("CUDA0", 30),)
    assert placed(host(gpu("CUDA0", 30), gpu_layers=0)).gpu_layers == ()
    assert placed(host(gpu("CUDA0", 30), gpu_layers=ALL)).gpu_layers == (("CUDA0", 30),)
    assert memory_on(SIZES, WHOLE, host(gpu("CUDA0", 29), gpu_layers=ALL)) is None
    assert memory_on(SIZES, WHOLE, host(gpu("CUDA0", 6), gpu_layers=7)) is None
    assert placed(host(gpu("CUDA0", 6), gpu_layers=7), LayerRange(0, 6)).gpu_layers == (("CUDA0", 6),)


def test_exact_stages_leave_gpus_alone() -> None:
    sizes = StageSizes(model_of(), replace(WORKLOAD, is_exact=True))
    assert placed(host(gpu("CUDA0", 30)), sizes=sizes).gpu_layers == ()


def test_memory_that_processor_and_gpu_share_counts_once() -> None:
    shared = gpu("MTL0", 30, shares=True)
    memory = placed(host(shared))
    assert memory.gpu_layers == (("MTL0", 30),)
    assert memory.loading_bytes > 3000 * MIB
    assert host(shared).all_bytes == host().all_bytes
    assert memory_on(SIZES, WHOLE, host(shared, memory_mib=2900)) is None


@given(
    st.lists(st.tuples(st.floats(0, 40), st.floats(1, 3000)), max_size=3),
    st.integers(0, 4000),
    st.one_of(st.none(), st.integers(-1, 40)),
    st.integers(0, 29),
)
def test_nothing_is_promised_twice_and_nothing_beyond_what_there_is(
    gpus: list[tuple[float, float]], memory_mib: int, gpu_layers: int | None, start: int
) -> None:
    found = [gpu(f"CUDA{index}", layers, speed) for index, (layers, speed) in enumerate(gpus)]
    capacity = host(*found, memory_mib=memory_mib, gpu_layers=gpu_layers)
    layers = LayerRange(start, 30)
    memory = memory_on(SIZES, layers, capacity)
    if memory is None:
        return
    left = capacity.without(memory)
    assert left.memory_bytes >= 0
    assert all(each.free_bytes >= 0 for each in left.gpus if each.name in dict(memory.gpu_layers))
    on_gpus = sum(share.weight_bytes for share in memory.gpus)
    in_memory = memory.loading_bytes - memory.buffer_bytes
    assert on_gpus + in_memory == SIZES.weight_bytes(layers)
    assert sum(count for _, count in memory.gpu_layers) <= len(layers)
    # Nor does more room make it worse.
    assert read_time(SIZES, layers, memory, capacity) > 0


def test_a_host_with_a_gpu_counts_as_fast_as_that_is() -> None:
    hosts = [host(memory_mib=9000), host(gpu("CUDA0", 40), name="gpu")]
    assert [stage.host for stage in plan(model_of(), hosts, WORKLOAD).stages] == ["gpu"]
    shares = plan(model_of(), hosts, WORKLOAD, num_stages=2).stages
    assert {stage.host: len(stage.layers) for stage in shares} == {"a": 1, "gpu": 29}
    assert {stage.host: stage.memory.gpu_layers for stage in shares} == {"a": (), "gpu": (("CUDA0", 29),)}


def test_a_gpu_that_is_too_small_makes_its_host_only_as_fast_as_it_is() -> None:
    """Five layers at 900 GB/s and the rest at 20 are no match for 40 throughout."""
    hosts = [host(gpu("CUDA0", 5), name="gpu"), replace(host(name="fast"), speed_gb_per_s=40.0)]
    shares = plan(model_of(), hosts, WORKLOAD, num_stages=2).stages
    counts = {stage.host: len(stage.layers) for stage in shares}
    assert counts["fast"] > counts["gpu"] > 5


def test_a_model_too_large_for_any_memory_fits_with_that_of_gpus() -> None:
    small = [host(memory_mib=1000, name=name) for name in "ab"]
    with pytest.raises(ModelDoesNotFit):
        plan(model_of(), small, WORKLOAD)
    hosts = [small[0], host(gpu("CUDA0", 20), memory_mib=500, name="b")]
    assert {stage.host for stage in plan(model_of(), hosts, WORKLOAD).stages} == {"a", "b"}
    with pytest.raises(ModelDoesNotFit, match=r"on a, .* on b and .* on its CUDA0"):
        plan(model_of(60), hosts, WORKLOAD)


def test_two_stages_of_one_host_do_not_fill_its_gpu_twice() -> None:
    stages = plan(model_of(), [host(gpu("CUDA0", 30))], WORKLOAD, num_stages=2).stages
    left = host(gpu("CUDA0", 30))
    for stage in stages:
        left = left.without(stage.memory)
    assert left.gpus[0].free_bytes >= 0
    assert all(stage.memory.gpu_layers for stage in stages)


def test_a_repair_takes_what_the_stages_that_stay_leave_on_a_gpu() -> None:
    first = host(gpu("CUDA0", 16), name="a")
    second = host(name="b")
    stages = [
        replace(stage, host=name, memory=placed(capacity, stage.layers))
        for stage, name, capacity in zip(
            plan(model_of(), [host(memory_mib=9000)], WORKLOAD, num_stages=2).stages,
            "ab",
            (first, second),
            strict=True,
        )
    ]
    assert stages[0].memory.gpu_layers == (("CUDA0", 15),)
    anew = replan(SIZES, stages, {1}, [first])
    # The process of a stage takes its part of the GPU too, so that no layer of the second finds room.
    assert [stage.placement.memory.gpu_layers for stage in anew.stages] == [(("CUDA0", 15),), ()]


def test_a_spare_s_copies_share_its_gpu() -> None:
    ring = plan(model_of(), [host(name="x", memory_mib=9000)], WORKLOAD, num_stages=2).stages
    spare = host(gpu("CUDA0", 15), memory_mib=100, name="spare")
    replica = next_replica(SIZES, ring, [spare], ())
    assert replica is not None
    assert next_replica(SIZES, ring, [spare], [replica]) is None


def test_weights_in_the_order_of_fast_kernels_may_take_more() -> None:
    facts = replace(model_of(4), packing_bytes=(10, 20, 30, 40), head_packing_bytes=500)
    plain, sizes = StageSizes(model_of(4), WORKLOAD), StageSizes(facts, WORKLOAD)
    for layers, more in ((LayerRange(0, 2), 30), (LayerRange(1, 4), 590)):
        assert sizes.memory(layers).loading_bytes - plain.memory(layers).loading_bytes == more
    exact = StageSizes(facts, replace(WORKLOAD, is_exact=True))
    assert exact.memory(LayerRange(0, 4)) == StageSizes(model_of(4), exact.workload).memory(LayerRange(0, 4))


def test_recurrent_layers_keep_a_state_for_each_session() -> None:
    facts = replace(model_of(4), state_widths=(1000, 0, 1000, 0))
    workload = Workload(ctx_size=512, num_slots=3)
    plain = StageSizes(model_of(4), workload)
    sizes = StageSizes(facts, workload)
    assert sizes.cache_bytes(LayerRange(0, 4)) - plain.cache_bytes(LayerRange(0, 4)) == 2 * 1000 * 4 * 3
    # A stage without any has a blank one for company.
    assert sizes.cache_bytes(LayerRange(1, 2)) - plain.cache_bytes(LayerRange(1, 2)) == 1000 * 4 * 3
    # However long sessions may be.
    longer = StageSizes(facts, replace(workload, ctx_size=4096))
    assert longer.cache_bytes(LayerRange(0, 4)) == sizes.cache_bytes(LayerRange(0, 4))
