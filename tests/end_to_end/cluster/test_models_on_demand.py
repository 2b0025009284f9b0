"""Models on demand with real processes: two that do not fit together answer in turn, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from mesh.api.api_keys import KeyRecord, add_key, digest_of
from mesh.cluster.addresses import free_port
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.text.text_service import text_bytes_of, worker_bytes
from stages.layers import LayerRange
from stages.slicing.model_facts import read_model_facts
from tests.support.api_harness import KEY, NO_AUTHORITIES
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.sweep, pytest.mark.timeout(400)]

MESH = str(Path(sys.executable).with_name("mesh"))
CTX_SIZE, NUM_SLOTS, MIN_STAY_S = 256, 2, 3.0
MAY, MAY_NOT = {"authorization": f"Bearer {KEY}"}, {"authorization": "Bearer sk-of-bob"}
NUM_REQUESTS = 8


def total_bytes(path: Path) -> int:
    facts = read_model_facts(path)
    return (
        StageSizes(facts, Workload(CTX_SIZE, NUM_SLOTS, is_exact=True))
        .memory(LayerRange(0, facts.n_layers))
        .total_bytes
    )


class Mesh:
    """A head with a library, for two keys.

    Attributes:
        url: Of the API.
    """

    def __init__(self, folder: Path, library: Path, memory_bytes: int, cache: Path) -> None:
        keys, port = folder / "keys", free_port("127.0.0.1")
        add_key(keys, KeyRecord("alice", digest_of(KEY), may_load=True, max_concurrent=64))
        add_key(keys, KeyRecord("bob", digest_of("sk-of-bob")))
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        arguments = [
            *("serve", "--library", library, "--port", port, "--advertise", "127.0.0.1", "--name", "alpha"),
            *("--api-key-file", keys, "--memory", memory_bytes, "--threads", 1, "--exact"),
            *("--ctx-size", CTX_SIZE, "--parallel", NUM_SLOTS),
            *("--set", f"min-stay={MIN_STAY_S}", "--idle-unload", 0.1),
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [MESH, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"XDG_CACHE_HOME": str(cache)},
            )

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", headers=MAY, timeout=30, verify=NO_AUTHORITIES).json()

    def loaded(self) -> set[str]:
        return {card["id"] for card in self.get("/v1/models")["data"] if card["loaded"]}

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/health", verify=NO_AUTHORITIES).status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, model: str, *, is_stream: bool = False, headers: dict[str, str] = MAY) -> httpx.Response:
        asked = {"model": model, "prompt": "The sea", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return httpx.post(
            f"{self.url}/v1/completions",
            json={**asked, "stream": is_stream},
            headers=headers,
            timeout=200,
            verify=NO_AUTHORITIES,
        )


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("application/json"):
        text: str = response.json()["choices"][0]["text"]
        return text
    lines = response.text.strip().split("\n")
    assert lines[-1] == "data: [DONE]", lines[-3:]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def until(condition: Callable[[], object], what: str, within_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


@pytest.fixture
def mesh(tmp_path: Path, stage_cache_dir: Path) -> Iterator[Mesh]:
    library = tmp_path / "library"
    library.mkdir()
    first = TinyModel("gemma3", n_layers=2, head_size=32).write(library / "first.gguf")
    one, two = (
        TinyModel("gemma3", n_layers=6, head_size=32, seed=seed).write(library / f"{name}.gguf")
        for name, seed in (("one", 11), ("two", 12))
    )
    assert total_bytes(one) == total_bytes(two)
    # Beside the first there is room for one of the others, not for both.
    for_texts = worker_bytes() + text_bytes_of(first) + text_bytes_of(one)
    memory_bytes = total_bytes(first) + total_bytes(one) * 3 // 2 + for_texts
    running = Mesh(tmp_path, library, memory_bytes, stage_cache_dir)
    yield running
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
        running.process.wait(120)


def test_two_that_do_not_fit_together_answer_in_turn(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    until(mesh.is_ready, "the first does not come")
    # The smallest is the first.
    assert mesh.loaded() == {"first"}
    assert [card["id"] for card in mesh.get("/v1/models")["data"]] == ["first", "one", "two"]
    held_bytes = mesh.get("/mesh/status")["hosts"][0]["held_bytes"]

    # A key without the right is refused, in so many words; what is loaded it may use.
    refused = mesh.ask("one", headers=MAY_NOT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
    assert all(word in refused.text for word in ("`one`", "bob", "mesh keys add --may-load"))
    assert mesh.ask("first", headers=MAY_NOT).status_code == 200
    assert mesh.loaded() == {"first"}

    seconds: dict[str, float] = {}

    def timed(what: str, model: str) -> str:
        start_s = time.monotonic()
        text = text_of(mesh.ask(model))
        seconds[what] = time.monotonic() - start_s
        return text

    wanted = {"one": timed("one, loaded first", "one")}
    assert mesh.loaded() == {"first", "one"}
    timed("one, loaded already", "one")
    wanted["two"] = timed("two, instead of one", "two")
    assert mesh.loaded() == {"first", "two"}
    assert wanted["one"] != wanted["two"]
    assert mesh.ask("two", headers=MAY_NOT).status_code == 200

    # Requests for both at once, streams and whole answers: each is answered as alone.
    asked = [("one" if number % 2 else "two", bool(number % 4 // 2)) for number in range(NUM_REQUESTS)]
    start_s = time.monotonic()
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda each: text_of(mesh.ask(each[0], is_stream=each[1])), asked))
    seconds[f"{NUM_REQUESTS} requests for both at once"] = time.monotonic() - start_s
    assert answers == [wanted[model] for model, _ in asked]
    # Those for one model were answered together: there were few changes.
    assert mesh.log.read_text().count('"models_unload_on_demand"') <= 4

    # Models that idle go, and their memory is free.
    until(lambda: mesh.loaded() == {"first"}, "idle models are not unloaded")
    assert mesh.get("/mesh/status")["hosts"][0]["held_bytes"] == held_bytes
    assert text_of(mesh.ask("one")) == wanted["one"]

    family = psutil.Process(mesh.process.pid).children(recursive=True)
    mesh.process.send_signal(signal.SIGINT)
    assert mesh.process.wait(120) == 130
    _, left = psutil.wait_procs(family, timeout=10)
    assert left == []
    with capsys.disabled():
        print("\n" + "\n".join(f"{what}: {took:.1f} s" for what, took in seconds.items()))
