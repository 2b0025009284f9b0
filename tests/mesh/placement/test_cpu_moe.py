"""How a host's GPUs get the attention of a mixture of experts, and as many experts as find room."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cli.main import run
from mesh.placement.gpu_layers import ALL, GPU_PROCESS_BYTES, memory_on, parse_cpu_moe, read_time
from mesh.placement.host_capacity import Gpu, HostCapacity
from mesh.placement.memory_estimate import StageSizes
from mesh.placement.planner import plan
from spanmesh_proto.errors import ClusterError
from stages.layers import LayerRange
from stages.slicing.model_facts import read_model_facts
from tests.mesh.placement.test_planner import MIB, OVERHEAD_BYTES, WORKLOAD
from tests.mesh.placement.test_planner import model as model_of
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    from stages.runtime.process_memory import StageMemory

WHOLE = LayerRange(0, 30)
# Layers of 100 MiB, 80 of which are experts.
MIXTURE = replace(model_of(), expert_bytes=(80 * MIB,) * 30)
SIZES = StageSizes(MIXTURE, WORKLOAD)
BESIDE_BYTES = SIZES.on_gpu.compute_bytes(WHOLE) + GPU_PROCESS_BYTES


def gpu(name: str, room_mib: float, speed: float = 900.0) -> Gpu:
    return Gpu(name, "a GPU", int(room_mib * MIB) + BESIDE_BYTES, 2**40, speed)


def host(
    *gpus: Gpu, memory_mib: int = 4000, gpu_layers: int | None = None, cpu_moe: int | None = None
) -> HostCapacity:
    memory_bytes = memory_mib * MIB + OVERHEAD_BYTES
    return HostCapacity("a", memory_bytes, 20.0, gpus=gpus, gpu_layers=gpu_layers, cpu_moe_layers=cpu_moe)


def placed(capacity: HostCapacity, layers: LayerRange = WHOLE) -> StageMemory:
    memory = memory_on(SIZES, layers, capacity)
    assert memory is not None
    return memory


def test_experts_go_to_a_gpu_that_has_room_for_all() -> None:
    memory = placed(host(gpu("CUDA0", 3000)))
    assert memory.gpu_layers == (("CUDA0", 30),)
    assert memory.cpu_moe_layers == 0
    assert "experts" not in str(memory)


def test_a_smaller_gpu_has_the_attention_of_all_layers_and_the_experts_of_the_last() -> None:
    memory = placed(host(gpu("CUDA0", 30 * 20 + 10 * 80)))
    assert memory.gpu_layers == (("CUDA0", 30),)
    assert memory.cpu_moe_layers == 20
    assert memory.gpus[0].weight_bytes == 1400 * MIB
    assert memory.loading_bytes - memory.buffer_bytes == 20 * 80 * MIB
    assert "experts of 20 layers on the processor" in str(memory)


def test_a_gpu_too_small_for_all_attention_has_that_of_the_last_layers() -> None:
    memory = placed(host(gpu("CUDA0", 25 * 20)))
    assert memory.gpu_layers == (("CUDA0", 25),)
    assert memory.cpu_moe_layers == 30
    assert memory.loading_bytes - memory.buffer_bytes == (5 * 100 + 25 * 80) * MIB


def test_experts_that_two_gpus_have_room_for_stay_there() -> None:
    memory = placed(host(gpu("CUDA0", 700), gpu("CUDA1", 700, 1800)))
    # From the last layer down: seven whole on the fastest, then three whole and the attention of the rest.
    assert memory.gpu_layers == (("CUDA0", 23), ("CUDA1", 7))
    assert memory.cpu_moe_layers == 20


def test_the_operator_s_number_counts_the_model_s_layers() -> None:
    large = gpu("CUDA0", 3000)
    for layers, number in (((0, 30), 12), ((10, 30), 2), ((15, 30), 0), ((0, 10), 10)):
        assert placed(host(large, cpu_moe=12), LayerRange(*layers)).cpu_moe_layers == number
        assert placed(host(large, cpu_moe=ALL), LayerRange(*layers)).cpu_moe_layers == layers[1] - layers[0]
        assert placed(host(large, cpu_moe=0), LayerRange(*layers)).cpu_moe_layers == 0
    # Then no more than these make room: the last layers are whole.
    assert placed(host(gpu("CUDA0", 1400), cpu_moe=12)).gpu_layers == (("CUDA0", 14),)


def test_experts_make_room_for_as_many_layers_as_the_operator_wants() -> None:
    memory = placed(host(gpu("CUDA0", 7 * 20 + 2 * 80), gpu_layers=7))
    assert memory.gpu_layers == (("CUDA0", 7),)
    assert memory.cpu_moe_layers == 28
    assert memory_on(SIZES, WHOLE, host(gpu("CUDA0", 7 * 20 - 1), gpu_layers=7)) is None


def test_a_model_without_experts_has_none_to_leave() -> None:
    sizes = StageSizes(model_of(), WORKLOAD)
    memory = memory_on(sizes, WHOLE, host(gpu("CUDA0", 1000), cpu_moe=ALL))
    assert memory is not None
    assert memory.cpu_moe_layers == 0
    assert memory.gpu_layers == (("CUDA0", 10),)


@given(
    st.lists(st.tuples(st.floats(0, 4000), st.floats(1, 3000)), max_size=3),
    st.integers(0, 4000),
    st.one_of(st.none(), st.integers(-1, 40)),
    st.one_of(st.none(), st.integers(-1, 40)),
    st.integers(0, 29),
)
def test_nothing_is_promised_twice_and_nothing_beyond_what_there_is(
    gpus: list[tuple[float, float]],
    memory_mib: int,
    gpu_layers: int | None,
    cpu_moe: int | None,
    start: int,
) -> None:
    found = [gpu(f"CUDA{index}", room, speed) for index, (room, speed) in enumerate(gpus)]
    capacity = host(*found, memory_mib=memory_mib, gpu_layers=gpu_layers, cpu_moe=cpu_moe)
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
    assert 0 <= memory.cpu_moe_layers <= len(layers)
    assert read_time(SIZES, layers, memory, capacity) > 0


@given(st.floats(0, 4000), st.integers(0, 29))
def test_fewer_experts_on_the_processor_would_cost_layers(room_mib: float, start: int) -> None:
    layers = LayerRange(start, 30)
    memory = placed(host(gpu("CUDA0", room_mib)), layers)
    if not memory.cpu_moe_layers:
        return
    fewer = start + memory.cpu_moe_layers - 1
    other = placed(host(gpu("CUDA0", room_mib), cpu_moe=fewer), layers)
    assert sum(count for _, count in other.gpu_layers) < sum(count for _, count in memory.gpu_layers)


def test_a_mixture_too_large_for_its_gpu_is_planned_over_gpu_and_processor() -> None:
    small = replace(host(gpu("CUDA0", 800), memory_mib=2500), name="small")
    (stage,) = plan(MIXTURE, [small], WORKLOAD).stages
    assert stage.memory.gpu_layers == (("CUDA0", 30),)
    # 600 for attention, and two layers' experts.
    assert stage.memory.cpu_moe_layers == 28


@pytest.mark.parametrize(
    ("number", "is_all", "found"), [(None, False, None), (0, False, 0), (7, False, 7), (None, True, ALL)]
)
def test_both_options_are_one_number(number: int | None, found: int | None, *, is_all: bool) -> None:
    assert parse_cpu_moe(number, is_all=is_all) == found


def test_all_and_some_contradict_one_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ClusterError, match="leave one of the two out"):
        parse_cpu_moe(3, is_all=True)
    model = str(TinyModel("llama").write(tmp_path / "tiny.gguf"))
    assert run(["serve", model, "--port", "0", "--cpu-moe", "--n-cpu-moe", "3"]) == 1
    assert "--cpu-moe means all layers" in capsys.readouterr().err


def test_a_model_s_experts_are_measured_by_its_header(tmp_path: Path) -> None:
    of_layer = 3 * 4 * 32 * 64 * 34 // 32
    moe = read_model_facts(TINY_FAMILIES["qwen3moe"].write(tmp_path / "moe.gguf"))
    assert moe.expert_bytes == (of_layer,) * 4
    # Its first layer is dense, and shared experts are for every token.
    some = read_model_facts(TINY_FAMILIES["glm4moe"].write(tmp_path / "some.gguf"))
    assert some.expert_bytes == (0, of_layer, of_layer, of_layer)
    # Biases of experts go with them.
    biased = read_model_facts(TINY_FAMILIES["gpt-oss"].write(tmp_path / "biased.gguf"))
    assert biased.expert_bytes == (of_layer + 4 * 4 * (32 + 32 + 64),) * 4
    assert read_model_facts(TinyModel("llama").write(tmp_path / "dense.gguf")).expert_bytes == ()


def test_the_first_stage_s_idle_head_takes_room_where_its_last_layer_is(tmp_path: Path) -> None:
    facts = replace(MIXTURE, idle_head_bytes=50 * MIB)
    sizes = StageSizes(facts, WORKLOAD)
    first, plain = LayerRange(0, 10), host(gpu("CUDA0", 3000))
    memory, other = memory_on(sizes, first, plain), memory_on(SIZES, first, plain)
    assert memory is not None
    assert other is not None
    assert memory.gpus[0].buffer_bytes - other.gpus[0].buffer_bytes == 50 * MIB
    assert memory.loading_bytes == other.loading_bytes
    for layers in (LayerRange(10, 20), WHOLE):
        assert memory_on(sizes, layers, plain) == memory_on(SIZES, layers, plain)
    # llama.cpp takes the embedding as a head where there is none, and copies it there.
    tiny = read_model_facts(TinyModel("llama").write(tmp_path / "tiny.gguf"))
    assert tiny.idle_head_bytes == tiny.embedding_bytes
