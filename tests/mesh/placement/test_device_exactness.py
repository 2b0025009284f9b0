"""Which devices compute in exact mode, and what users are told of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.placement.gpu_layers import check_gpu_layers, memory_on
from mesh.placement.host_assignment import StageTable
from mesh.placement.host_capacity import Gpu, HostCapacity
from mesh.placement.memory_estimate import StageSizes
from spanmesh_proto.errors import ClusterError
from stages.layers import LayerRange
from stages.runtime.devices import GpuPlacing, list_devices
from stages.runtime.numerics import UNKNOWN, VERDICTS, Verdict, exact_reasons, verdict_on
from tests.mesh.placement.test_planner import MIB, OVERHEAD_BYTES, WORKLOAD
from tests.mesh.placement.test_planner import model as model_of

ROOM_BYTES = 9000 * MIB
CUDA = Gpu("CUDA0", "a GPU", ROOM_BYTES, ROOM_BYTES, 900.0)
VULKAN = replace(CUDA, name="Vulkan1", speed_gb_per_s=800.0)
HOST = HostCapacity("a", 4000 * MIB + OVERHEAD_BYTES, 20.0, gpus=(CUDA, VULKAN))
WHOLE = LayerRange(0, 30)
SIZES = StageSizes(model_of(), replace(WORKLOAD, is_exact=True))


@pytest.fixture
def exact_vulkan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERDICTS, "Vulkan", Verdict(is_exact=True, reason="measured"))
    monkeypatch.setitem(VERDICTS, "CUDA", Verdict(is_exact=False, reason="two rows differ from one"))


def test_what_was_not_measured_is_not_trusted() -> None:
    assert verdict_on("SYCL3") is UNKNOWN
    assert "python -m tests.qualification.device_exactness" in exact_reasons(["SYCL3", "SYCL4"])
    assert exact_reasons(["SYCL3", "SYCL4"]).count("SYCL") == 1
    assert all(not verdict.is_exact or verdict.reason for verdict in VERDICTS.values())


@pytest.mark.usefixtures("exact_vulkan")
def test_layers_in_exact_mode_go_to_devices_that_were_measured() -> None:
    memory = memory_on(SIZES, WHOLE, HOST)
    assert memory is not None
    assert memory.gpu_layers == (("Vulkan1", 30),)
    in_fast_mode = memory_on(StageSizes(model_of(), WORKLOAD), WHOLE, HOST)
    assert in_fast_mode is not None
    assert in_fast_mode.gpu_layers == (("CUDA0", 30),)
    without = replace(HOST, gpus=(CUDA,))
    memory = memory_on(SIZES, WHOLE, without)
    assert memory is not None
    assert memory.gpu_layers == ()
    # The search over stages counts the same.
    table = StageTable(SIZES)
    assert table.time_ns(WHOLE, HOST) < table.time_ns(WHOLE, without)


@pytest.mark.usefixtures("exact_vulkan")
def test_a_device_is_refused_with_its_reason() -> None:
    check_gpu_layers(3, [CUDA, VULKAN], is_exact=True)
    with pytest.raises(
        ClusterError, match=r"on CPUs only here \(CUDA: two rows differ from one\); --gpu-layers 3"
    ):
        check_gpu_layers(3, [CUDA], is_exact=True)


def test_a_stage_in_exact_mode_leaves_other_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (processor,) = (device for device in list_devices() if device.kind == "cpu")
    monkeypatch.setattr("stages.runtime.devices.layer_devices", lambda: (processor,))
    monkeypatch.setattr("llama_cpp.llama_supports_gpu_offload", lambda: True)
    wanted = ((processor.name, 3),)
    assert GpuPlacing.find(wanted).counts == (3,)
    assert not GpuPlacing.find(wanted, exact=True).has_gpu
    assert not GpuPlacing.find(None, exact=True).has_gpu
    monkeypatch.setitem(VERDICTS, processor.name, Verdict(is_exact=True, reason="it is a processor"))
    assert GpuPlacing.find(wanted, exact=True).counts == (3,)
