"""An embedding model on hosts of their own: sent to one, killed, moved, taken over, lost with its host."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from mesh.status import EmbeddingModelStatus, MeshStatus, RepairStatus
from meshbench.lab.network import Lab
from tests.support.lab_fixtures import require_lab
from tests.support.lab_mesh import PATIENCE_S, Running, running_mesh
from tests.support.tiny_embedders import TinyEmbedder

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = [pytest.mark.lab, pytest.mark.sweep, pytest.mark.timeout(1200)]

NUM_HOSTS = 4  # the head, which holds nothing, and three others
DELAY_MS = 3.0
OPTIONS = ["--speculate", "off", "--parallel", "2", "--ctx-size", "512", "--stages", "2"]
TEXTS = ["a short text", "word1 word2 word3", "word4 " * 40]
POST = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


@dataclass
class Embeddings:
    """The embedding model of a running mesh."""

    mesh: Running

    def embed(self) -> NDArray[np.float32]:
        url = f"http://127.0.0.1:{self.mesh.system.port}/v1/embeddings"
        body = json.dumps({"model": "tiny", "input": TEXTS})
        done = self.mesh.lab.exec(0, [sys.executable, "-S", "-c", POST, url, body], timeout_s=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        rows: NDArray[np.float32] = np.array(
            [item["embedding"] for item in json.loads(done.stdout)["data"]], np.float32
        )
        return rows

    def status(self) -> EmbeddingModelStatus:
        return in_status(self.mesh.status())

    def host(self) -> int:
        (stage,) = self.status().stages
        return int(stage.host.removeprefix("host"))

    def processes(self) -> list[int]:
        """On all hosts."""
        found = []
        for pid in [pid for host in range(NUM_HOSTS) for pid in self.mesh.lab.pids(host)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if " ".join(psutil.Process(pid).cmdline()).startswith("ray::EmbeddingActor"):
                    found.append(pid)
        return found

    def until_repaired(self, num_repairs: int) -> None:
        def is_repaired(status: MeshStatus) -> bool:
            model = in_status(status)
            return bool(model.ready) and model.repairs.count == num_repairs

        self.mesh.until(is_repaired, "the embedding model is not repaired")


def in_status(status: MeshStatus) -> EmbeddingModelStatus:
    """Entry of the embedding model; a head that takes over may not have one yet."""
    nothing = EmbeddingModelStatus(ready=False, repairs=RepairStatus(count=-1))
    return next((model for model in status.models if isinstance(model, EmbeddingModelStatus)), nothing)


def test_vectors_stay_the_same_whatever_happens_to_its_host(smollm2_path: Path, tmp_path: Path) -> None:
    require_lab()
    path = TinyEmbedder("bert").write(tmp_path / "tiny.gguf")
    with (
        Lab(NUM_HOSTS, DELAY_MS, shared=[tmp_path]) as lab,
        running_mesh(lab, smollm2_path, tmp_path, num_hosts=NUM_HOSTS, options=OPTIONS) as mesh,
    ):
        mesh.order("load", str(path), "--embeddings")
        go_through(Embeddings(mesh))


def go_through(model: Embeddings) -> None:
    mesh = model.mesh
    before = model.embed()
    assert np.linalg.norm(before, axis=1) == pytest.approx(np.ones(len(TEXTS)), abs=1e-5)
    assert len(model.processes()) == 1
    # The head, which has the file, holds no model: it was sent.
    assert model.host() > 0

    (process,) = model.processes()
    psutil.Process(process).kill()
    assert model.embed() == pytest.approx(before, abs=1e-5)
    model.until_repaired(1)

    mesh.until(
        lambda _status: (
            [each["order"]["embeddings"] for each in json.loads(mesh.state.read_text())["models"]] == [True]
        ),
        "what was loaded is not written down",
    )
    processes = model.processes()
    mesh.system.process(0).send_signal(signal.SIGKILL)
    mesh.system.process(0).wait()
    mesh.system.start_head()
    mesh.system.wait_healthy(timeout_s=PATIENCE_S)
    mesh.until(lambda status: bool(in_status(status).ready), "the embedding model is not taken over")
    assert model.embed() == pytest.approx(before, abs=1e-5)
    assert model.processes() == processes

    drained = model.host()
    mesh.order("drain", f"host{drained}")
    assert model.host() not in {0, drained}
    assert model.embed() == pytest.approx(before, abs=1e-5)

    lost = model.host()
    mesh.lab.kill(lost)
    model.until_repaired(1)
    assert model.host() not in {0, drained, lost}
    assert model.embed() == pytest.approx(before, abs=1e-5)

    mesh.order("unload", "tiny")
    assert model.processes() == []
    assert model.status().stages == ()
