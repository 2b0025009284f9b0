"""`--gpu-layers`, from what the user writes to what llama.cpp is told."""

import ctypes
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from mesh.cli.main import run
from mesh.cluster.host_facts import HostFacts, read_versions
from mesh.cluster.members import Member, member_of, report_of
from mesh.placement.gpu_layers import ALL, check_gpu_layers, format_gpu_layers, parse_gpu_layers
from mesh.placement.host_capacity import Gpu
from spanmesh_proto.errors import ClusterError, InvalidModel, ModelDoesNotFit
from stages.layers import LayerRange
from stages.runtime.devices import FileLayers, GpuPlacing, layer_devices, list_devices, read_file_layers
from stages.runtime.llama import heard_log
from stages.runtime.process_memory import GpuShare, StageMemory
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.weights.virtual_stages import StageCache
from tests.stages.runtime.test_stage_memory import MIB, actor_for
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

GPU = Gpu("CUDA0", "a GPU", 20 * 2**30, 24 * 2**30, 900.0)
NO_GPU = pytest.mark.skipif(
    bool(layer_devices()), reason="this machine has a GPU: tests/gpu/test_gpu_parity.py"
)


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("all", ALL), ("None", 0), (" auto ", None), ("0", 0)]
)
def test_a_number_and_three_words_are_understood(text: str, number: int | None) -> None:
    assert parse_gpu_layers(text) == number
    assert parse_gpu_layers(format_gpu_layers(number)) == number


@pytest.mark.parametrize("text", ["", "-1", "some", "1.5", "all!"])
def test_anything_else_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(ClusterError, match="write one, or all, none or auto"):
        parse_gpu_layers(text)


def test_what_cannot_be_had_is_refused() -> None:
    for harmless in (None, 0):
        check_gpu_layers(harmless, (), is_exact=True)
    check_gpu_layers(12, [GPU])
    with pytest.raises(
        ClusterError, match=r"--gpu-layers all: llama.cpp finds no GPU here; build it for one"
    ):
        check_gpu_layers(ALL, ())
    with pytest.raises(ClusterError, match=r"--exact computes on CPUs only.*--gpu-layers 12"):
        check_gpu_layers(12, [GPU], is_exact=True)


@NO_GPU
def test_the_commands_refuse_layers_for_a_gpu_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(TinyModel("llama").write(tmp_path / "tiny.gguf"))
    assert run(["serve", model, "--port", "0", "--gpu-layers", "5"]) == 1
    assert "--gpu-layers 5: llama.cpp finds no GPU here" in capsys.readouterr().err
    assert run(["serve", model, "--port", "0", "--gpu-layers", "all", "--exact"]) == 1
    assert "--exact computes on CPUs only" in capsys.readouterr().err
    assert run(["serve", model, "--gpu-layers", "many"]) == 2
    assert "'many' is not a number of layers" in capsys.readouterr().err
    assert run(["join", "token", "--gpu-layers", "-3"]) == 2


@pytest.mark.parametrize("wanted", [None, ALL, 0, 12])
@pytest.mark.parametrize("cpu_moe", [None, ALL, 3])
def test_a_host_s_gpus_and_the_user_s_word_reach_the_head(wanted: int | None, cpu_moe: int | None) -> None:
    facts = HostFacts(2**30, 4, 20.0, read_versions(), (GPU,), wanted, cpu_moe)
    assert facts.capacity("studio").cpu_moe_layers == cpu_moe
    member = Member("studio", "10.0.0.2", facts, "studio.1")
    report = report_of(member, secret="s", check_ports=(1,), check_nonce=b"n", certificate_request=b"")
    assert member_of(type(report).FromString(report.SerializeToString())) == member


def test_a_draft_model_is_counted_wherever_it_may_lie() -> None:
    facts = HostFacts(4 * 2**30, 4, 20.0, read_versions(), (GPU,))
    capacity = facts.capacity("head").on_head(draft_bytes=2**30)
    assert capacity.memory_bytes == 3 * 2**30
    assert capacity.gpus[0].free_bytes == 19 * 2**30


def test_texts_are_counted_in_the_hosts_own_memory() -> None:
    for shares, on_gpu in ((False, 0), (True, 2**30)):
        gpu = replace(GPU, shares_host_memory=shares)
        facts = HostFacts(4 * 2**30, 4, 20.0, read_versions(), (gpu,))
        capacity = facts.capacity("head").on_head(request_bytes=2**30)
        assert capacity.memory_bytes == 3 * 2**30
        assert capacity.gpus[0].free_bytes == GPU.free_bytes - on_gpu
        assert "beside 1.0 GiB for reading texts" in str(capacity)


def test_llama_cpp_is_told_where_each_layer_goes() -> None:
    """llama.cpp counts the head as one more layer, and shares layers out in proportion."""
    (processor,) = (device for device in list_devices() if device.kind == "cpu")
    params = llama_cpp.llama_model_default_params()
    GpuPlacing((processor, processor), (5, 7)).apply(params)
    assert params.n_gpu_layers == 13
    assert [params.tensor_split[index] for index in range(2)] == [5.0, 8.0]
    pointers = ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p))
    assert pointers[0] is not None
    assert pointers[0] == pointers[1]
    assert pointers[2] is None

    params = llama_cpp.llama_model_default_params()
    GpuPlacing.find(()).apply(params)
    assert params.n_gpu_layers == 0
    assert ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p))[0] is None
    assert params.tensor_buft_overrides is None

    # What is behind the stage's own layers in its file goes with the last of them.
    params = llama_cpp.llama_model_default_params()
    GpuPlacing((processor, processor), (5, 7)).apply(params, FileLayers(before=1, own=12, after=2))
    assert params.n_gpu_layers == 15
    assert [params.tensor_split[index] for index in range(2)] == [5.0, 10.0]
    # Nothing is said about numbers unless somebody has said them.
    params = llama_cpp.llama_model_default_params()
    GpuPlacing((), None).apply(params)
    assert params.n_gpu_layers == -1


def test_a_device_that_is_gone_is_named() -> None:
    with pytest.raises(ClusterError, match=r"layers are assigned to CUDA7, which llama.cpp does not find"):
        GpuPlacing.find([("CUDA7", 3)])


def logits_of(path: Path, options: RuntimeOptions) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    with closing(StageRuntime(path, options)) as runtime:
        rows = [runtime.decode([Span(0, row, [row + 3], num_outputs=1)])[0] for row in range(40)]
    return np.concatenate(rows)


@NO_GPU
def test_without_a_gpu_all_words_load_the_same_model(tmp_path: Path) -> None:
    path = TinyModel("llama").write(tmp_path / "tiny.gguf")
    as_found = logits_of(path, RuntimeOptions(ctx_size=64))
    assert np.array_equal(logits_of(path, RuntimeOptions(ctx_size=64, gpu_layers=())), as_found)
    with pytest.raises(ClusterError, match="CUDA0"):
        StageRuntime(path, RuntimeOptions(ctx_size=64, gpu_layers=(("CUDA0", 2),)))


def test_experts_stay_where_they_are_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By llama.cpp's own log. Blank layers before the stage's own are not counted."""
    (processor,) = (device for device in list_devices() if device.kind == "cpu")
    monkeypatch.setattr("stages.runtime.devices.layer_devices", lambda: (processor,))
    monkeypatch.setattr("llama_cpp.llama_supports_gpu_offload", lambda: True)
    model = TINY_FAMILIES["llama4-short"].write(tmp_path / "model.gguf")
    path = StageCache(tmp_path).cut(model, LayerRange(2, 4)).path
    assert read_file_layers(path) == FileLayers(before=2, own=2, after=0)
    log: list[str] = []
    with heard_log(log.append):
        options = RuntimeOptions(ctx_size=64, gpu_layers=((processor.name, 2),), cpu_moe_layers=2)
        StageRuntime(path, options).close()
    kept = {found[1] for line in log if (found := re.search(r"tensor (\S+) .* overridden to CPU", line))}
    assert kept == {f"blk.3.ffn_{kind}_exps.weight" for kind in ("gate", "up", "down")}
    log.clear()
    with heard_log(log.append):
        StageRuntime(path, replace(options, cpu_moe_layers=1)).close()
    assert not any("overridden" in line for line in log)


def test_a_file_tells_which_of_its_layers_are_a_stage_s_own(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    # A stage of layers of one kind has one of the other behind or before them.
    hybrid = TINY_FAMILIES["qwen3next"].write(tmp_path / "hybrid.gguf")
    assert read_file_layers(hybrid) == FileLayers(0, 6, 0)
    assert read_file_layers(cache.cut(hybrid, LayerRange(0, 1)).path) == FileLayers(0, 1, 2)
    assert read_file_layers(cache.cut(hybrid, LayerRange(5, 6)).path) == FileLayers(1, 1, 0)
    predicting = TINY_FAMILIES["qwen3next"].with_prediction_layer().write(tmp_path / "predicting.gguf")
    assert read_file_layers(predicting) == FileLayers(0, 6, 1)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidModel, match=r"broken\.gguf"):
        read_file_layers(tmp_path / "broken.gguf")


def test_layers_on_a_named_device_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor stands in for a GPU: llama.cpp loads, and computes, layers on it as on any device."""
    (processor,) = (device for device in list_devices() if device.kind == "cpu")
    monkeypatch.setattr("stages.runtime.devices.layer_devices", lambda: (processor,))
    monkeypatch.setattr("llama_cpp.llama_supports_gpu_offload", lambda: True)
    path = TinyModel("llama").write(tmp_path / "tiny.gguf")
    alone = logits_of(path, RuntimeOptions(ctx_size=64, gpu_layers=()))
    for count in (1, 4, 6):
        options = RuntimeOptions(ctx_size=64, gpu_layers=((processor.name, count),))
        # Caches are laid out otherwise beside a GPU, so that sums round otherwise; random weights swell that.
        assert np.abs(logits_of(path, options) - alone).mean() < 0.1 * alone.std()


async def test_a_stage_is_refused_before_its_gpu_is_overfull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (processor,) = (device for device in list_devices() if device.kind == "cpu")
    monkeypatch.setattr("stages.serving.actor.layer_devices", lambda: (processor,))
    path = TinyModel("llama").write(tmp_path / "tiny.gguf")
    share = GpuShare(processor.name, 3, MIB, MIB, MIB)
    fitting = StageMemory(MIB, MIB, MIB, 192 * MIB, (share,))
    await actor_for(path, tmp_path / "cache", fitting).check_memory()
    large = GpuShare(processor.name, 3, 2 * processor.total_bytes, MIB, MIB)
    too_large = StageMemory(2 * processor.total_bytes, MIB, MIB, 192 * MIB, (large,))
    actor = actor_for(path, tmp_path / "cache", too_large)
    for work in (actor.check_memory, actor.load):
        with pytest.raises(ModelDoesNotFit, match=r"on studio's CPU now: 3 layers there need .*--gpu-layers"):
            await work()
    unknown = StageMemory(MIB, MIB, MIB, 192 * MIB, (GpuShare("gone", 3, 2**50, 0, 0),))
    # What is not there says so when it is to be loaded.
    await actor_for(path, tmp_path / "cache", unknown).check_memory()
