"""What llama.cpp can compute on here, by its own list."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.cluster.host_facts import find_gpus
from spanmesh_proto.errors import ClusterError
from stages.runtime.devices import (
    Device,
    GpuPlacing,
    device_speed_gb_per_s,
    layer_devices,
    list_devices,
    speed_of_reads,
)
from stages.runtime.llama_libraries import gpu_backends, kernels_folder, may_have_layer_devices

GPU = Device("CUDA0", "a GPU", "gpu", "CUDA", "0000:01:00.0", 8 * 2**30, 10 * 2**30, 1)
OTHER = replace(GPU, name="CUDA1", id="0000:02:00.0", index=2)
INTEGRATED = replace(GPU, name="Vulkan0", kind="integrated gpu", backend="Vulkan", id="", index=3)
PROCESSOR = Device("CPU", "a processor", "cpu", "CPU", "", 0, 0, 0)


def names(devices: tuple[Device, ...]) -> list[str]:
    return [device.name for device in devices]


def test_llama_cpp_lists_the_processor_with_its_memory() -> None:
    devices = list_devices()
    (processor,) = (device for device in devices if device.kind == "cpu")
    assert processor.name == "CPU"
    assert processor.backend == "CPU"
    assert processor.description
    assert processor.total_bytes >= processor.free_bytes > 2**20
    assert [device.index for device in devices] == list(range(len(devices)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_llama_cpp_is_loaded_once() -> None:
    """A second copy of its libraries would have a list of devices of its own."""
    list_devices()
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split()[-1] for line in lines if "ggml" in line or "libllama" in line}
    stems = [Path(path).name.partition(".")[0] for path in loaded]
    assert len(stems) >= 3
    assert sorted(set(stems)) == sorted(stems)


def test_layers_go_to_every_gpu_once_and_to_no_processor() -> None:
    same = replace(GPU, name="Vulkan0", backend="Vulkan", index=4)
    blas = replace(PROCESSOR, name="BLAS", kind="accelerator", index=5)
    assert names(layer_devices([PROCESSOR, GPU, OTHER, same, blas])) == ["CUDA0", "CUDA1"]
    unnamed = replace(GPU, id=""), replace(OTHER, id="")
    assert names(layer_devices(unnamed)) == ["CUDA0", "CUDA1"]
    assert not layer_devices([PROCESSOR, blas])


def test_an_integrated_gpu_is_used_only_where_there_is_no_other() -> None:
    again = replace(INTEGRATED, name="SYCL0", backend="SYCL")
    assert names(layer_devices([INTEGRATED, again])) == ["Vulkan0"]
    assert names(layer_devices([INTEGRATED, GPU])) == ["CUDA0"]
    lent = replace(GPU, name="RPC0", backend="RPC", id="")
    assert names(layer_devices([INTEGRATED, lent])) == ["RPC0", "Vulkan0"]


def test_apple_s_gpus_and_integrated_ones_take_the_host_s_own_memory() -> None:
    assert INTEGRATED.shares_host_memory
    assert replace(GPU, backend="MTL").shares_host_memory
    assert not GPU.shares_host_memory


@pytest.mark.parametrize(
    ("files", "backends"),
    [
        (["libllama.so", "libggml.so", "libggml-base.so", "libggml-cpu.so"], ()),
        (["libggml.so.0", "libggml-base.so.0.25.3", "libggml-cpu-haswell.so", "libggml-blas.so"], ()),
        (["libggml.so", "libggml-base.so", "libggml-cpu.so", "libggml-cuda.so"], ("cuda",)),
        (["libggml-base.dylib", "libggml-cpu.dylib", "libggml-metal.dylib"], ("metal",)),
        (["ggml-base.dll", "ggml-cpu-x64.dll", "ggml-vulkan.dll", "ggml-cuda.dll"], ("cuda", "vulkan")),
        # One library with everything in it, or none at all: it has to be asked.
        (["libllama.so"], None),
        ([], None),
    ],
)
def test_what_llama_cpp_was_built_with_shows_in_its_files(
    files: list[str], backends: tuple[str, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    assert gpu_backends() == backends
    assert may_have_layer_devices() is (backends != ())


@pytest.mark.parametrize(
    ("files", "several"),
    [
        (["libggml.so.0", "libggml-base.so.0.25.3", "libggml-cpu-haswell.so", "libggml-cpu-zen4.so"], True),
        (["ggml-base.dll", "ggml-cpu-x64.dll"], True),
        (["libllama.so", "libggml-cpu.so", "libggml-cpu.so.0.25.3"], False),
        ([], False),
    ],
)
def test_kernels_for_several_processors_show_in_their_files(
    files: list[str], *, several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    assert kernels_folder() == (tmp_path if several else None)


def test_gpus_found_by_another_process_are_those_that_are_there() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mesh.cluster.device_probe"], capture_output=True, text=True, check=True
    )
    there = {device.name for device in layer_devices()}
    assert {gpu["name"] for gpu in json.loads(done.stdout)} == there
    assert {gpu.name for gpu in find_gpus()} == there


def test_a_probe_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder without llama.cpp's libraries: it may have GPUs, and the process that looks ends badly.
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"cannot inspect this host's GPUs: .*; --gpu-layers none"):
        find_gpus()


def test_a_device_s_speed_is_measured_by_computing_on_it() -> None:
    (processor,) = (device for device in list_devices() if device.kind == "cpu")
    # Any machine that runs this reads between 0.1 and 10,000 GB/s; a unit mixed up would fall outside.
    assert 0.1 < device_speed_gb_per_s(processor, probe_bytes=32 * 2**20) < 10_000


MIB = 2**20


@pytest.mark.parametrize(
    ("bytes_per_s", "start_s", "sizes"),
    [
        pytest.param(1e12, 1e-5, [8 * MIB, 32 * MIB, 128 * MIB, 512 * MIB], id="card"),
        pytest.param(1e9, 0.0, [8 * MIB, 32 * MIB], id="slow"),
        pytest.param(3e7, 0.0, [8 * MIB], id="slowest"),
    ],
)
def test_reads_grow_until_one_takes_long(bytes_per_s: float, start_s: float, sizes: list[int]) -> None:
    read = []

    def read_s(num_bytes: int) -> float:
        read.append(num_bytes)
        return start_s + num_bytes / bytes_per_s

    assert speed_of_reads(read_s, 512 * MIB) == pytest.approx(bytes_per_s, rel=0.03)
    assert read == sizes


def test_a_small_device_is_measured_by_what_it_has_room_for() -> None:
    read = []

    def read_s(num_bytes: int) -> float:
        read.append(num_bytes)
        return 0.001

    assert speed_of_reads(read_s, 5 * MIB) == pytest.approx(5e3 * MIB)
    assert read == [5 * MIB]


def test_what_reads_the_last_layers_goes_with_them() -> None:
    assert GpuPlacing((GPU, OTHER), (3, 4)).behind() == GpuPlacing((OTHER,), (0,))
    for unchanged in (GpuPlacing((), ()), GpuPlacing((GPU, OTHER), None)):
        assert unchanged.behind() == unchanged
