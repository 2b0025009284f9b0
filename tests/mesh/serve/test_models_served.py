"""Two models on one mesh, from first to last: refused, loaded, taken over, healed, unloaded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from mesh.cluster.addresses import free_port
from tests.support.api_harness import NO_AUTHORITIES
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(400)]

MESH = str(Path(sys.executable).with_name("mesh"))
OPTIONS = ["--advertise", "127.0.0.1", "--threads", "1", "--ctx-size", "256", "--parallel", "2", "--exact"]


class Mesh:
    """A head, `alpha`, and one host, `beta`.

    Attributes:
        url: Of the API.
    """

    def __init__(self, folder: Path, model: Path, cache: Path) -> None:
        self._folder, self._model, self._cache = folder, model, cache
        self._port, self._join_port = free_port("127.0.0.1"), free_port("127.0.0.1")
        self._token = folder / "token"
        self._started: list[subprocess.Popen[bytes]] = []
        self.url = f"http://127.0.0.1:{self._port}"

    def start_head(self) -> subprocess.Popen[bytes]:
        places = ["--port", str(self._port), "--join-port", str(self._join_port), "--name", "alpha"]
        files = ["--token-file", str(self._token), "--state", str(self._folder / "state.json")]
        asked = [*OPTIONS, "--wait-for", "1", "--split", "15,15", "--linger", "60", "--memory", "3G"]
        return self._start("serve", str(self._model), *places, *files, *asked)

    def start_host(self) -> subprocess.Popen[bytes]:
        until(self._token.exists, "no token file")
        return self._start(
            *("join", "--token-file", str(self._token), "--name", "beta", "--advertise", "127.0.0.1"),
            *("--threads", "1", "--memory", "3G"),
        )

    def log(self, number: int) -> str:
        return (self._folder / f"{number}.log").read_text()

    def load(self, model: Path, **options: object) -> httpx.Response:
        asked = {"model": str(model), "ctx_size": 256, "parallel": 2, "exact": True, **options}
        return httpx.post(f"{self.url}/mesh/load", json=asked, timeout=120)

    def unload(self, name: str) -> httpx.Response:
        return httpx.post(f"{self.url}/mesh/unload?model={name}", timeout=120)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/mesh/status", timeout=30, verify=NO_AUTHORITIES).json()
        return found

    def ask(self, model: str) -> str:
        asked = {"model": model, "prompt": "The sea", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def is_ready(self, *models: str) -> bool:
        try:
            ready = {each["name"] for each in self.status()["models"] if each["ready"]}
        except httpx.TransportError:
            return False
        return ready >= set(models)

    def close(self) -> None:
        for process in reversed(self._started):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(120)

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{len(self._started)}.log").open("w") as log:
            process = subprocess.Popen(
                [MESH, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"XDG_CACHE_HOME": str(self._cache)},
            )
        self._started.append(process)
        return process


def until(condition: Callable[[], object], what: str, within_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


def family_of(*heads: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [child for head in heads for child in psutil.Process(head.pid).children(recursive=True)]


@pytest.fixture
def mesh(tmp_path: Path, smollm2_path: Path, stage_cache_dir: Path) -> Iterator[Mesh]:
    running = Mesh(tmp_path, smollm2_path, stage_cache_dir)
    yield running
    running.close()


def test_two_models_are_served_healed_taken_over_and_one_is_unloaded(mesh: Mesh, tmp_path: Path) -> None:
    tiny = TinyModel("gemma3", head_size=32, n_ctx_train=8192).write(tmp_path / "tiny.gguf")
    head = mesh.start_head()
    mesh.start_host()
    first = "SmolLM2-135M-Instruct.Q4_1"
    until(lambda: head.poll() is None and mesh.is_ready(first), "the first does not come")
    alone = mesh.ask(first)
    held_before = {host["name"]: host["held_bytes"] for host in mesh.status()["hosts"]}

    # What is no model, or does not fit, changes nothing.
    (tmp_path / "none.gguf").write_bytes(b"GGUF of nothing")
    assert mesh.load(tmp_path / "none.gguf").json()["error"]["code"] == "invalid_model"
    refused = mesh.load(tiny, name="huge", parallel=64, ctx_size=1_000_000).json()["error"]
    assert refused["code"] == "model_does_not_fit"
    assert "does not fit: it needs" in refused["message"]
    assert "of other models" in refused["message"]
    assert [model["name"] for model in mesh.status()["models"]] == [first]
    assert {host["name"]: host["held_bytes"] for host in mesh.status()["hosts"]} == held_before

    # As long a context as the model was trained for, since nobody names another.
    loaded = mesh.load(tiny, split=[3, 3], ctx_size=None)
    assert (loaded.status_code, loaded.json()["model"]) == (200, "tiny"), loaded.text
    assert loaded.json()["context"] == (
        "context: 8,192 positions for each of 2 sessions: the model was trained for no more"
    )
    assert [stage["threads"] for stage in loaded.json()["stages"]] == [1, 1]
    taken = mesh.load(tiny).json()["error"]
    assert (taken["param"], "a model is served as 'tiny' already" in taken["message"]) == ("name", True)
    status = mesh.status()
    assert [model["name"] for model in status["models"]] == [first, "tiny"]
    assert [model["model"]["context"] for model in status["models"]] == [256, 8192]
    assert {stage["host"] for stage in status["models"][1]["stages"]} == {"alpha", "beta"}
    assert all("tiny [" in host["layers"] for host in status["hosts"])
    assert all(host["held_bytes"] > held_before[host["name"]] for host in status["hosts"])
    assert mesh.ask(first) == alone
    whole = mesh.ask("tiny")
    assert whole != alone

    # The head is killed: the next one takes the stages of both over, and loads nothing.
    written = tmp_path / "state.json"
    until(lambda: json.loads(written.read_text())["models"], "what was loaded is not written down")
    family = family_of(head)
    head.send_signal(signal.SIGKILL)
    head.wait()
    head = mesh.start_head()
    until(lambda: mesh.is_ready(first, "tiny"), "no takeover")
    assert (mesh.ask(first), mesh.ask("tiny")) == (alone, whole)
    log = mesh.log(2)
    assert log.count('"stages_taken_over"') == 2, log
    assert '"stage_loaded"' not in log
    # Sessions count on the context that the stages were loaded with.
    assert [model["model"]["context"] for model in mesh.status()["models"]] == [256, 8192]

    # A stage of each is lost with the host: both heal on the one that is left.
    host = mesh._started[1]
    children = family_of(host)
    host.send_signal(signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):  # some end with it
            child.kill()
    until(
        lambda: (
            {stage["host"] for model in mesh.status()["models"] for stage in model["stages"]} == {"alpha"}
            and mesh.is_ready(first, "tiny")
        ),
        "they do not heal",
    )
    assert (mesh.ask(first), mesh.ask("tiny")) == (alone, whole)
    assert all(model["repairs"]["count"] >= 1 for model in mesh.status()["models"])

    # Unloaded, its memory on the hosts is free.
    held = mesh.status()["hosts"][0]["held_bytes"]
    kept = mesh.unload(first).json()["error"]
    assert "is the model of `mesh serve`" in kept["message"]
    assert mesh.unload("tiny").json() == {"model": "tiny", "unloaded": True, "ended": 0}
    status = mesh.status()
    assert ([model["name"] for model in status["models"]], "tiny" in status["hosts"][0]["layers"]) == (
        [first],
        False,
    )
    assert status["hosts"][0]["held_bytes"] < held
    unknown = httpx.post(f"{mesh.url}/v1/completions", json={"model": "tiny", "prompt": "x"}, timeout=60)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert mesh.unload("tiny").status_code == 404
    assert mesh.ask(first) == alone

    # Once that is answered, it is so: a crash a moment later does not bring it back.
    family += family_of(head)
    assert mesh.load(tiny, split=[3, 3]).status_code == 200
    assert mesh.unload("tiny").status_code == 200
    head.send_signal(signal.SIGKILL)
    head.wait()
    assert json.loads((tmp_path / "state.json").read_text())["models"] == []
    head = mesh.start_head()
    until(lambda: mesh.is_ready(first), "no second takeover")
    assert [model["name"] for model in mesh.status()["models"]] == [first]
    assert mesh.ask(first) == alone

    # And in the end nothing of anything.
    family += family_of(head)
    head.send_signal(signal.SIGINT)
    assert head.wait(120) == 130
    _, left = psutil.wait_procs(family, timeout=10)
    assert left == []
