"""Protocol for a day with a card, as far as a machine without one goes: phases, results, report, folder."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from spanmesh_proto.errors import ClusterError
from stages.runtime.devices import layer_devices
from tests.qualification.gpu_day.carry import carry
from tests.qualification.gpu_day.device_buffers import DeviceBuffers
from tests.qualification.gpu_day.phases import Bench
from tests.qualification.gpu_day.report import goals, markdown
from tests.qualification.gpu_day.runner import PhaseResult, ResultStore, run_all
from tests.qualification.gpu_day.scale import DAY, SCALES, TINY, Phase, even_cuts, phases_of
from tests.qualification.random_model import SHAPES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.qualification.gpu_day.scale import Scale

MIB = 2**20
# Neither is on a machine with a card and nothing else.
HEAVY = {"ray", "fastapi", "uvicorn", "cryptography", "pydantic", "prometheus_client", "matplotlib"}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_a_model_s_phases_follow_each_other(scale: Scale) -> None:
    phases = phases_of(scale)
    assert len({phase.name for phase in phases}) == len(phases)
    assert phases[0] == Phase("device")
    models = [phase.model for phase in phases if phase.model]
    assert list(dict.fromkeys(models)) == list(scale.shapes)
    assert models == sorted(models, key=list(scale.shapes).index)
    assert {scale.parity, scale.speculation, scale.experts, scale.stops} <= scale.shapes.keys()
    assert {*scale.shapes.values(), scale.exactness} <= SHAPES.keys()
    assert {phase.kind for phase in phases} == {
        "device",
        "exactness",
        "whole",
        "ring",
        "parity",
        "speculation",
        "experts",
        "stops",
    }


def test_stages_on_a_card_are_even() -> None:
    assert even_cuts(32, 1) == ()
    assert even_cuts(32, 4) == (8, 16, 24)
    assert even_cuts(7, 2) == (3,)


def test_a_phase_that_failed_is_to_be_run_again(tmp_path: Path) -> None:
    store, phase = ResultStore(tmp_path), Phase("ring", "8B", 2)
    assert store.of(phase) is None
    store.keep(phase, PhaseResult(phase.name, 1.0, {}, "the driver was lost"))
    assert not store.is_done(phase)
    store.keep(phase, PhaseResult(phase.name, 1.0, {"decode": []}))
    assert ResultStore(tmp_path).is_done(phase)
    assert (tmp_path / "results" / "ring-8B-2.json").is_file()


def bench(folder: Path) -> Bench:
    return Bench(folder, TINY, None, 1)


def test_what_is_done_does_not_run_and_nothing_begins_that_would_end_too_late(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    for phase in phases_of(TINY)[:-1]:
        store.keep(phase, PhaseResult(phase.name, 1.0, {"rows": []}))
    times_s = iter([0.0, 90.0, 90.0])
    assert run_all(bench(tmp_path), limit_s=60.0, budget_s=100.0, clock_s=lambda: next(times_s)) == []
    assert run_all(bench(tmp_path), limit_s=60.0, wanted=["device"]) == []


def test_without_a_card_a_phase_fails_with_the_reason(tmp_path: Path) -> None:
    if layer_devices():
        pytest.skip("llama.cpp finds a GPU here")
    (result,) = run_all(bench(tmp_path), limit_s=60.0, wanted=["device"])
    assert result.failure == "llama.cpp finds no device for layers here; it finds none"
    assert ResultStore(tmp_path).of(Phase("device")) == result


def test_a_phase_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    (result,) = run_all(bench(tmp_path), limit_s=0.01, wanted=["device"])
    assert result.failure.startswith("it took longer than 0 s")
    assert not ResultStore(tmp_path).is_done(Phase("device"))


def decoded(**rates: float) -> dict[str, Any]:
    """Figures of a phase; rates by number of sessions, such as `of_32`."""
    rows = [{"sessions": int(name.removeprefix("of_")), "tokens_per_s": rate} for name, rate in rates.items()]
    return {"decode": rows, "refused": [], "prefill_tokens_per_s": 5000.0}


def test_goals_are_ratios_of_what_was_measured() -> None:
    figures = {
        "whole-8B": decoded(of_1=100.0),
        "ring-8B-1": decoded(of_1=99.0, of_32=1980.0),
        "ring-8B-2": decoded(of_1=95.0),
        "ring-8B-4": decoded(of_1=80.0),
    }
    assert [(line.measured, line.verdict) for line in goals(DAY, figures)] == [
        (0.95, "met"),
        (0.8, "missed"),
        (20.0, ""),
        (None, "not measured"),
        (None, "not measured"),
    ]
    assert goals(TINY, {}) == []


def test_the_report_holds_what_was_measured_and_names_what_was_not() -> None:
    memory = {
        **{f"{part}_bytes": 100 * MIB for part in ("weight", "cache", "buffer")},
        **{f"foretold_{part}_bytes": 110 * MIB for part in ("weight", "cache", "buffer")},
    }
    whole = decoded(of_1=100.0) | {"refused": ["64 sessions: too little memory"]}
    ring = decoded(of_1=95.0) | {"memory": memory}
    parity = {"num_tokens": 64, "num_agreed": 63, "mean_kl_nats": 0.001, "is_bit_equal": False}
    found = {
        "device": {"description": "Some card", "driver": "1.2", "llama_cpp_log": ["ggml_vulkan: found"]},
        "whole-8B": whole,
        "ring-8B-2": ring,
        "parity-1B": {"cuts": [4, 8, 12], "stages": parity, "split": parity, "processor": parity},
        "exactness": {"settings": [{"setting": "plain", "is_exact": False, "found": "1 of 9 | rows"}]},
    }
    results = {name: PhaseResult(name, 1.0, figures) for name, figures in found.items()}
    results["ring-8B-4"] = PhaseResult("ring-8B-4", 480.0, {}, "it took longer than 480 s")
    report = markdown(DAY, results)
    assert report.startswith("# Stages on Some card, scale day\n")
    assert "| driver | 1.2 |" in report
    assert "ggml_vulkan: found" in report
    assert "| 1 | 100.0 |  | 95.0 (0.95) |  |" in report
    assert "- whole: 64 sessions: too little memory" in report
    assert "| 8B | 2 | 100 / 110 | 100 / 110 | 100 / 110 |" in report
    assert "| 1B | 4 stages on the card | 63/64 | 0.001000 | no |" in report
    assert "| plain | yes | 1 of 9 / rows |" in report
    assert "- ring-8B-4: it took longer than 480 s" in report
    assert "- ring-32B-1: did not run" in report
    assert "- whole-8B" not in report
    assert "Speculation" not in report


def test_the_folder_to_carry_holds_sources_and_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries, package = tmp_path / "built", tmp_path / "one_package"
    for path in (libraries, package):
        path.mkdir()
    (libraries / "libggml-vulkan.so").write_bytes(b"\x7fELF")
    (package / "__init__.py").write_text("A = 1\n")
    (tmp_path / "one_module.py").write_text("B = 2\n")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(libraries))
    folder = tmp_path / "carried"
    carry(folder, [("one_package", package), ("one_module", tmp_path / "one_module.py")])
    carried = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {
        "lib/libggml-vulkan.so",
        "one_package/__init__.py",
        "one_module.py",
        "tests/qualification/gpu_day/__main__.py",
        "stages/_stop_tap.so",
        "spanmesh_proto/windows_pb2.py",
        "speculative/lookup_proposers.py",
    } <= carried
    assert not [name for name in carried if name.endswith(".gguf") or "__pycache__" in name]
    with pytest.raises(ClusterError, match="exists"):
        carry(folder, [])


def test_the_protocol_needs_few_packages() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, tests.qualification.gpu_day.__main__; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    assert "tests.qualification.gpu_day.card_ring" in loaded
    assert HEAVY & {name.partition(".")[0] for name in loaded} == set()


def test_buffers_are_summed_by_name_and_kind() -> None:
    buffers = DeviceBuffers()
    for line in (
        "load_tensors:      Vulkan0 model buffer size =    10.00 MiB",
        "load_tensors:   CPU_Mapped model buffer size =     3.50 MiB",
        "load_tensors:   CPU_REPACK model buffer size =     1.50 MiB",
        "llama_kv_cache:    Vulkan0 KV buffer size =     2.00 MiB",
        "llama_kv_cache:    Vulkan0 KV buffer size =     1.00 MiB",
        "sched_reserve:     Vulkan0 compute buffer size =     4.25 MiB",
        "sched_reserve: Vulkan_Host compute buffer size =     0.25 MiB",
        "llama_kv_cache: size =    3.00 MiB (   512 cells,   8 layers,  1/1 seqs)",
    ):
        buffers.note(line)
    assert buffers.of("Vulkan0") == 17.25 * MIB
    assert buffers.of("Vulkan0", "model", "KV") == 13 * MIB
    assert buffers.on_host("model") == 5 * MIB
    assert buffers.as_dict()["Vulkan_Host"] == {"compute": MIB // 4}
