"""Mesh of three hosts, one on the GPU, one on both, one on its processor; and the loss of the first."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from meshbench.lab.network import Lab
from meshbench.lab.systems import MeshSystem, last_lines
from tests.qualification.device_parity import PROCESSOR, random_prompt
from tests.support.lab_fixtures import require_lab
from tests.support.lab_mesh import PATIENCE_S, Running
from tests.support.short_models import write_short

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from stages.runtime.devices import Device

pytestmark = [pytest.mark.gpu, pytest.mark.lab, pytest.mark.model, pytest.mark.timeout(900)]

NUM_HOSTS, NUM_LAYERS, NUM_TOKENS = 4, 9, 40
PROMPT = random_prompt(49_152, 24)
SERVE = ("--ctx-size", "256", "--parallel", "2", "--speculate", "off")
PLACES: dict[int, tuple[str, ...]] = {
    1: ("--gpu-layers", "all"),
    2: ("--gpu-layers", "1"),
    3: ("--gpu-layers", "none"),
}


@contextmanager
def running(lab: Lab, model: Path, logs: Path, places: Mapping[int, tuple[str, ...]]) -> Iterator[Running]:
    logs.mkdir()
    system = MeshSystem(
        lab,
        model,
        logs,
        split=(3, 3, 3),
        options=[*SERVE, "--gpu-layers", "none", "--state", str(logs / "state.json")],
        join_options=["--memory", "1G"],
        join_options_of=places,
    )
    try:
        system.start(timeout_s=PATIENCE_S)
        yield Running(lab, system, NUM_HOSTS, logs / "state.json")
    except BaseException:
        for host in range(NUM_HOSTS):
            if system.log(host).exists():
                print(f"--- host{host}\n{last_lines(system.log(host), 60)}")
        raise
    finally:
        for host in range(NUM_HOSTS):
            lab.kill(host)


def said(mesh: Running, tokens: list[int] | None = None) -> list[dict[str, Any]]:
    """The mesh's greedy tokens, or those that it would say after each of the given ones."""
    job = {"url": f"http://127.0.0.1:{mesh.system.port}", "prompt": PROMPT, "max_tokens": NUM_TOKENS}
    client = mesh.lab.run(
        0,
        [sys.executable, "-m", "tests.support.forced_client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = client.communicate(json.dumps(job | {"tokens": tokens}).encode(), timeout=PATIENCE_S)
    assert client.returncode == 0, errors.decode()
    found: list[dict[str, Any]] = json.loads(output)
    return found


def divergence_nats(ours: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    """KL divergence of the texts that both have among their likeliest, and of all others as one."""
    both = ours.keys() & theirs.keys()
    pairs = [(math.exp(ours[text]), math.exp(theirs[text])) for text in both]
    rest = [max(1e-9, 1.0 - sum(column)) for column in zip(*pairs, strict=True)]
    return math.fsum(p * math.log(p / q) for p, q in (*pairs, (rest[0], rest[1])))


def require_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    agreed = sum(one["id"] == other["id"] for one, other in zip(ours, theirs, strict=True))
    nats = sum(
        divergence_nats(one["top"], other["top"]) for one, other in zip(ours, theirs, strict=True)
    ) / len(ours)
    print(f"{agreed} of {len(ours)} tokens, KL {nats:.6f}")
    assert agreed >= PROCESSOR.least_share * len(ours)
    assert nats < PROCESSOR.most_kl_nats


def gpu_layers(mesh: Running) -> dict[str, dict[str, int]]:
    """Layers on GPUs by host, as the head logs them of each stage that is loaded."""
    found: dict[str, dict[str, int]] = {}
    for line in mesh.system.log(0).read_text().splitlines():
        if '"stage_loaded"' in line:
            event = json.loads(line)
            found[event["host"]] = event["gpu_layers"]
    return found


def test_a_mesh_of_gpus_and_processors_says_what_processors_say_and_survives_the_gpu(
    smollm2_path: Path, tmp_path: Path, gpu: Device
) -> None:
    require_lab()
    model = write_short(smollm2_path, NUM_LAYERS, tmp_path / "short.gguf")
    with Lab(NUM_HOSTS, 1.0, shared=[tmp_path]) as lab:
        nowhere = dict.fromkeys(PLACES, ("--gpu-layers", "none"))
        with running(lab, model, tmp_path / "processors", nowhere) as mesh:
            expected = said(mesh)
            assert gpu_layers(mesh) == {"host1": {}, "host2": {}, "host3": {}}
        tokens = [each["id"] for each in expected]
        assert len(tokens) == NUM_TOKENS
        with running(lab, model, tmp_path / "mixed", PLACES) as mesh:
            assert gpu_layers(mesh) == {"host1": {gpu.name: 3}, "host2": {gpu.name: 1}, "host3": {}}
            hosts = {host.name: host for host in mesh.status().hosts}
            assert [each.name for each in hosts["host1"].gpus] == [gpu.name]
            require_same(expected, said(mesh, tokens))
            # The host on the GPU dies: its layers go to those that are left.
            lab.kill(1)
            status = mesh.until_repaired(1)
            assert "host1" not in [stage.host for stage in status.stages]
            assert sum(stage.layers[1] - stage.layers[0] for stage in status.stages) == NUM_LAYERS
            require_same(expected, said(mesh, tokens))
