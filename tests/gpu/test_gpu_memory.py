"""Memory on a GPU: what is foretold, what llama.cpp's log says, and what the device has left."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from mesh.cluster.host_facts import find_gpus
from mesh.placement.gpu_layers import GPU_PROCESS_BYTES, memory_on
from mesh.placement.host_capacity import Gpu, HostCapacity
from mesh.placement.memory_estimate import StageSizes, Workload
from stages.layers import LayerRange
from stages.runtime.devices import list_devices
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.model_facts import read_model_facts
from stages.weights.virtual_stages import StageCache
from tests.qualification.gpu_day.device_buffers import DeviceBuffers, heard_buffers
from tests.qualification.random_model import SHAPES, write_random_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from stages.runtime.devices import Device
    from stages.runtime.process_memory import StageMemory

pytestmark = pytest.mark.gpu
MIB = 2**20
MUCH_BYTES = 2**50
# Quantised caches take flash attention wherever there is any: without it, buffers are larger than foretold.
WORKLOAD = Workload(ctx_size=1024, num_slots=3, kv_type="q8_0")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense") / "small.gguf"
    write_random_gguf(path, SHAPES["small"], "Q8_0")
    return path


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture") / "small-moe.gguf"
    write_random_gguf(path, SHAPES["small-moe"], "Q8_0")
    return path


def foretold(
    model: Path, layers: LayerRange, gpu: Device, *, gpu_layers: int | None = None, cpu_moe: int | None = 0
) -> StageMemory:
    host = HostCapacity(
        "here",
        MUCH_BYTES,
        20.0,
        gpus=(Gpu(gpu.name, gpu.description, MUCH_BYTES, MUCH_BYTES, 900.0),),
        gpu_layers=gpu_layers,
        cpu_moe_layers=cpu_moe,
    )
    memory = memory_on(StageSizes(read_model_facts(model), WORKLOAD), layers, host)
    assert memory is not None
    return memory


def taken(path: Path, memory: StageMemory) -> DeviceBuffers:
    """Buffers of a stage that is loaded as planned, and computes."""
    options = RuntimeOptions(
        num_slots=WORKLOAD.num_slots,
        ctx_size=WORKLOAD.ctx_size,
        kv_type=WORKLOAD.kv_type,
        gpu_layers=memory.gpu_layers,
        cpu_moe_layers=memory.cpu_moe_layers,
    )
    with heard_buffers() as buffers, closing(StageRuntime(path, options)) as runtime:
        if runtime.info.is_first:
            runtime.decode([Span(0, 0, [5, 6, 7])])
    return buffers


def require_foretold(buffers: DeviceBuffers, memory: StageMemory, gpu: Device) -> None:
    (share,) = memory.gpus
    weights, cache = buffers.of(gpu.name, "model"), buffers.of(gpu.name, "KV")
    compute = buffers.of(gpu.name, "compute")
    most_compute = share.buffer_bytes - GPU_PROCESS_BYTES
    print(
        f"{gpu.name}, MiB: weights {weights / MIB:.1f} of {share.weight_bytes / MIB:.1f}, "
        f"cache {cache / MIB:.1f} of {share.cache_bytes / MIB:.1f}, "
        f"buffers {compute / MIB:.1f} of {most_compute / MIB:.1f}"
    )
    assert weights == pytest.approx(share.weight_bytes, rel=0.1)
    assert cache == pytest.approx(share.cache_bytes, rel=0.1)
    assert compute <= most_compute


@pytest.mark.parametrize("count", [8, 3])
def test_a_whole_model_takes_of_a_gpu_what_is_foretold(count: int, dense: Path, gpu: Device) -> None:
    memory = foretold(dense, LayerRange(0, 8), gpu, gpu_layers=count)
    assert memory.gpu_layers == ((gpu.name, count),)
    require_foretold(taken(dense, memory), memory, gpu)


@pytest.mark.parametrize("layers", [LayerRange(0, 4), LayerRange(2, 6), LayerRange(5, 8)])
def test_a_stage_takes_of_a_gpu_what_is_foretold(
    layers: LayerRange, dense: Path, tmp_path: Path, gpu: Device
) -> None:
    memory = foretold(dense, layers, gpu)
    buffers = taken(StageCache(tmp_path).cut(dense, layers).path, memory)
    # A first stage's head, which it has without use, is foretold among the buffers.
    (share,) = memory.gpus
    idle_bytes = StageSizes(read_model_facts(dense), WORKLOAD).idle_head_bytes(layers)
    assert buffers.of(gpu.name, "model") == pytest.approx(share.weight_bytes + idle_bytes, rel=0.1)
    assert buffers.of(gpu.name, "KV") == pytest.approx(share.cache_bytes, rel=0.1)
    most_compute = share.buffer_bytes - GPU_PROCESS_BYTES - idle_bytes
    assert buffers.of(gpu.name, "compute") <= most_compute


@pytest.mark.parametrize("count", [0, 3, 8])
def test_experts_are_where_they_should_be(count: int, mixture: Path, gpu: Device) -> None:
    memory = foretold(mixture, LayerRange(0, 8), gpu, cpu_moe=count)
    assert memory.gpu_layers == ((gpu.name, 8),)
    assert memory.cpu_moe_layers == count
    buffers = taken(mixture, memory)
    require_foretold(buffers, memory, gpu)
    facts = read_model_facts(mixture)
    on_host = sum(facts.expert_bytes[:count]) + facts.embedding_bytes
    # Mapped from the file, which has other tensors between them, or copied for the processor's kernels.
    assert on_host <= 1.1 * buffers.on_host("model")


def test_auto_keeps_as_many_experts_on_a_gpu_as_find_room(mixture: Path, gpu: Device) -> None:
    facts = read_model_facts(mixture)
    sizes = StageSizes(facts, WORKLOAD)
    whole = LayerRange(0, 8)
    beside = sizes.on_gpu.compute_bytes(whole) + GPU_PROCESS_BYTES
    room = sizes.on_gpu.layer_bytes(0, 8) - sum(facts.expert_bytes[:5])
    small = Gpu(gpu.name, gpu.description, beside + room, MUCH_BYTES, 900.0)
    memory = memory_on(sizes, whole, HostCapacity("here", MUCH_BYTES, 20.0, gpus=(small,)))
    assert memory is not None
    assert memory.gpu_layers == ((gpu.name, 8),)
    assert memory.cpu_moe_layers == 5
    require_foretold(taken(mixture, memory), memory, gpu)


def test_a_device_tells_its_memory(gpu: Device) -> None:
    (found,) = (device for device in list_devices() if device.name == gpu.name)
    assert 0 <= found.free_bytes <= found.total_bytes
    by_probe = {each.name: each for each in find_gpus()}
    assert by_probe[gpu.name].total_bytes == found.total_bytes
    assert by_probe[gpu.name].speed_gb_per_s > 0
