"""`mesh serve --draft assistant.gguf` as a user runs it: the assistant goes where the last stage is."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from mesh.cluster.addresses import free_port
from tests.end_to_end.cluster.test_serve import Mesh, is_healthy, run, until
from tests.qualification.own_models import OWN_MODELS
from tests.support.assistant_files import write_assistant

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.sociable]

FIXED = ("--set", "spec-width=3", "--set", "spec-depth=3")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    # Files have to be sent.
    running = Mesh(tmp_path, tmp_path / "caches")
    yield running
    running.close()


def complete(port: int, mode: str, temperature: float, model: str = "default") -> tuple[str, int]:
    """Text of an answer, and how many of its tokens the assistant has proposed."""
    body = {"prompt": list(range(20, 50)), "max_tokens": 40, "temperature": temperature, "seed": 4}
    reply = httpx.post(
        f"http://127.0.0.1:{port}/v1/completions",
        json=body | {"model": model, "speculation": {"mode": mode}, "ignore_eos": True},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    speculation = answer["timings"].get("speculation") or {"proposers": {}}
    return answer["choices"][0]["text"], speculation["proposers"].get("assistant", {}).get("drafted", 0)


def test_it_is_served_and_goes_on_with_a_host_that_takes_the_tail(mesh: Mesh, tmp_path: Path) -> None:
    model = OWN_MODELS["gemma4-dense"](2).write(tmp_path / "model.gguf")
    assistant = write_assistant(tmp_path / "assistant.gguf")
    port, token = free_port("127.0.0.1"), tmp_path / "token"
    serving = mesh.start(
        *("serve", str(model), "--draft", str(assistant), "--exact", "--port", str(port)),
        *("--token-file", str(token), "--head-only", "--wait-for", "3", "--split", "2,2,2"),
        *("--ctx-size", "256", "--speculate", "draft", *FIXED),
    )
    until(token.exists, "no token file")
    names = ("a", "b", "c")
    hosts = {
        name: mesh.start("join", "--token-file", str(token), "--name", name, "--threads", "1", cache=name)
        for name in names
    }
    until(lambda: is_healthy(port) or serving.process.poll() is not None, "the mesh does not come up")
    assert serving.saw("assistant_tried", draft=assistant.name)
    plain = [complete(port, "off", temperature) for temperature in (0, 0.2, 0.8)]
    assert all(num_drafted == 0 for _, num_drafted in plain)

    def check_drafts() -> None:
        found = [complete(port, "draft", temperature) for temperature in (0, 0.2, 0.8)]
        assert [text for text, _ in found] == [text for text, _ in plain]
        assert all(num_drafted > 10 for _, num_drafted in found)

    check_drafts()
    url = f"http://127.0.0.1:{port}"
    status = httpx.get(f"{url}/mesh/status").json()
    assert [stage["layers"] for stage in status["stages"]] == [[0, 2], [2, 4], [4, 6]]
    tail = status["stages"][-1]["host"]
    hosts[tail].process.send_signal(signal.SIGKILL)
    until(lambda: serving.saw("repaired"), "the tail is not replaced")
    check_drafts()
    assert run("status", "--url", url).returncode == 0
    family = serving.descendants()
    assert serving.interrupt()[0] == 130
    # The trial's tracker of resources ends as soon as it sees that the head has ended.
    until(lambda: not any(each.is_running() for each in family), "a process is left", 10)


@pytest.mark.sweep
def test_it_is_loaded_beside_another_model(mesh: Mesh, tmp_path: Path) -> None:
    model = OWN_MODELS["gemma4-dense"](2).write(tmp_path / "model.gguf")
    assistant = write_assistant(tmp_path / "assistant.gguf")
    port = free_port("127.0.0.1")
    serving = mesh.start(
        *("serve", str(model), "--exact", "--port", str(port)),
        *("--ctx-size", "256", "--speculate", "off", "--threads", "1"),
    )
    until(lambda: is_healthy(port) or serving.process.poll() is not None, "the mesh does not come up")
    url = f"http://127.0.0.1:{port}"
    asked = [str(model), "--url", url, "--name", "drafted", "--exact", "--ctx-size", "256", "--stages", "2"]
    other = write_assistant(tmp_path / "other.gguf", metadata={"embedding_length_out": 96})
    refused = run("load", *asked, "--draft", str(other))
    assert refused.returncode == 1
    assert "it was made for another model" in refused.stderr.splitlines()[-1]
    loaded = run("load", *asked, "--draft", str(assistant), "--speculate", "draft", *FIXED)
    assert loaded.returncode == 0, loaded.stderr
    assert serving.saw("assistant_tried", draft=assistant.name)
    for temperature in (0, 0.8):
        plain, _ = complete(port, "off", temperature)
        text, num_drafted = complete(port, "draft", temperature, "drafted")
        assert text == plain
        assert num_drafted > 10
    assert serving.interrupt()[0] == 130
