"""`mesh serve` is killed and started again: the stages that outlived it go on; nothing is loaded or sent."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mesh.bench.client import Client
from mesh.bench.mesh_system import MeshSystem
from mesh.bench.server_process import last_lines
from mesh.bench.stream_client import Answer, Ask, Batch
from mesh.bench.stress.processes import role_of
from mesh.lab import Lab
from tests.lab_fixtures import require_lab

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

NUM_HOSTS = 3
QUESTION = {
    "messages": [{"role": "user", "content": "Describe a house by the sea."}],
    "max_tokens": 24,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    require_lab()
    with Lab(NUM_HOSTS, 1.0, shared=[tmp_path_factory.getbasetemp()]) as running:
        yield running


def stage_processes(lab: Lab) -> list[int]:
    found = []
    for host in range(lab.num_hosts):
        for pid in lab.pids(host):
            argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if role_of(argv) == "stage":
                found.append(pid)
    return sorted(found)


def ask(lab: Lab) -> Answer:
    with Client(lab) as client:
        return client.ask(Batch(MeshSystem.port, (Ask("/v1/chat/completions", dict(QUESTION)),))).answers[0]


def test_stages_are_taken_over_by_the_next_head(lab: Lab, smollm2_path: Path, tmp_path: Path) -> None:
    mesh = MeshSystem(lab, smollm2_path, tmp_path, split=[15, 15], options=["--exact", "--parallel", "2"])
    try:
        mesh.start()
        before = ask(lab)
        assert before.num_tokens == QUESTION["max_tokens"]
        stages = stage_processes(lab)
        assert len(stages) == NUM_HOSTS - 1
        time.sleep(1.5)  # what happened last is written down within half a second

        mesh.process(0).send_signal(signal.SIGKILL)
        mesh.process(0).wait()
        started_s = time.monotonic()
        mesh.start_head()
        mesh.wait_healthy()
        took_s = time.monotonic() - started_s

        assert ask(lab).text == before.text
        assert stage_processes(lab) == stages
        log = mesh.log(0).read_text()
        assert "stages_taken_over" in log, last_lines(mesh.log(0), 40)
        assert log.count('"stage_loaded"') == len(stages)
        assert log.count('"stage_sent"') == len(stages)
        print(f"served again after {took_s:.1f} s")
        # In the end all go, as if nothing had happened.
        mesh.stop()
        assert stage_processes(lab) == []
        assert lab.pids(1) == []
    finally:
        mesh.kill()
