"""Commands on a GPU: doctor, plan, ways to end a graph, and the protocol for a day with a card."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mesh.doctor import Outcome, host_checks
from stages.host.host_report import report_host
from stages.runtime.llama_libraries import gpu_backends
from tests.qualification.device_stops import WITH_OUTPUT, measure, table
from tests.qualification.gpu_day.scale import TINY, phases_of
from tests.qualification.random_model import SHAPES, Shape, write_random_gguf

if TYPE_CHECKING:
    from stages.runtime.devices import Device

pytestmark = pytest.mark.gpu
MESH = str(Path(sys.executable).with_name("mesh"))
TINY_MOE = Shape(4, 256, 512, 4, 2, 512, is_tied=False, n_experts=8, n_experts_used=2, n_ff_expert=128)


def test_doctor_names_backend_device_and_memory(gpu: Device) -> None:
    assert gpu.backend.lower() in (gpu_backends() or ())
    (check,) = (check for check in host_checks("here", asdict(report_host())) if check.what == "device")
    assert check.outcome is Outcome.OK
    assert re.search(rf"{gpu.name} \(.*, [\d.]+ \w+ of [\d.]+ \w+ free\)", check.detail)
    assert f"its backends: cpu, {gpu.backend.lower()}" in check.detail


def test_plan_shows_layers_and_experts_on_the_gpu_and_times_them(tmp_path: Path, gpu: Device) -> None:
    model = tmp_path / "tiny-moe.gguf"
    write_random_gguf(model, TINY_MOE, "Q8_0")
    options = ["--ctx-size", "512", "--n-cpu-moe", "2", "--prompt-tokens", "32", "--json"]
    done = subprocess.run(
        [MESH, "plan", str(model), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (stage,) = found["stages"]
    assert [(share["device"], share["num_layers"]) for share in stage["gpus"]] == [
        (gpu.name, TINY_MOE.n_layers)
    ]
    assert stage["cpu_moe_layers"] == 2
    assert stage["row_ms"] > 0
    assert found["prediction"]["tokens_per_s"] > 0


def test_every_way_to_end_a_graph_is_timed(tmp_path: Path, gpu: Device) -> None:
    model = tmp_path / "tiny.gguf"
    write_random_gguf(model, SHAPES["tiny"], "Q4_0")
    found = measure(model, gpu.name, tmp_path, num_rows=(1, 8), num_rounds=5)
    print(f"{gpu.description}, times in ms\n{table(found)}")
    cases = {(each.stage, each.num_on_device, each.num_rows) for each in found}
    assert len(cases) == 8
    for case in cases:
        of_case = [each for each in found if (each.stage, each.num_on_device, each.num_rows) == case]
        assert {each.way for each in of_case} > WITH_OUTPUT
        assert all(each.window_ms > 0 for each in of_case)


def test_the_day_s_protocol_runs_from_its_start_to_its_report(tmp_path: Path, gpu: Device) -> None:
    command = [sys.executable, "-m", "tests.qualification.gpu_day", str(tmp_path / "day"), "--scale", "tiny"]
    done = subprocess.run(
        [*command, "--limit-s", "200", "--threads", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "day" / "report.md").read_text()
    print(report)
    assert gpu.description in report
    assert "did not run" not in report
    headings = ("Prefill", "Memory of the card", "Tokens that agree", "Speculation", "Experts", "Ways to end")
    for heading in headings:
        assert f"\n## {heading}" in report
    # All of it is done: a second run measures nothing.
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "day" / "report.md").read_text() == report
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, check=True, timeout=60)
    assert listed.stdout.count("done") == len(phases_of(TINY))
