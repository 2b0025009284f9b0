"""What `mesh serve`, `join` and `status` refuse before they start anything: one line that says why."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mesh.cluster.addresses import free_port
from mesh.text.text_service import num_text_workers, worker_bytes

pytestmark = pytest.mark.model

MESH = str(Path(sys.executable).with_name("mesh"))
# SmolLM2's vocabulary takes 30 MiB of each process for texts.
FOR_TEXTS_BYTES = worker_bytes() + num_text_workers() * 30 * 2**20
TIGHT = str(1100 * 2**20 + FOR_TEXTS_BYTES)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([MESH, *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_a_port_in_use_is_found_out_before_any_work() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        answer = run("serve", "--port", str(other.getsockname()[1]))
    assert answer.returncode == 1
    (said,) = answer.stderr.splitlines()
    assert said.startswith("error: another process listens on 127.0.0.1:")


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["serve", "missing.gguf"], 1, "missing.gguf"),
        (["serve", __file__], 1, "GGUF"),
        (["serve", "--host", "0.0.0.0"], 1, "--api-key-file"),
        (["serve", "--head-only"], 1, "--wait-for"),
        (["serve", "--name", "no name"], 1, "cannot be a host's name"),
        (["serve", "--advertise", "203.0.113.9"], 1, "203.0.113.9"),
        (["serve", "--split", "10,x"], 2, "10,10,10"),
        (["serve", "--parallel", "0"], 2, "--parallel"),
        (["serve", "--memory", "much"], 2, "8G"),
        (["serve", "--memory", "100M"], 1, "does not fit"),
        (["serve", "--memory", TIGHT, "--ctx-size", "8192"], 1, "it would fit with --kv-type q8_0 or"),
        (["serve", "--kv-type", "q9"], 2, "'q9' is not one of"),
        (["serve", "--stages", "99"], 1, "1 to 30 stages"),
        (["serve", "--split", "10,10"], 1, "has 30"),
        (["serve", "--draft", "missing.gguf"], 1, "missing.gguf"),
        (["serve", "--draft", __file__], 1, "GGUF"),
        (["serve", "--speculate", "draft"], 1, "mesh draft make"),
        (["serve", "--speculate", "replay", "--set", f"replay-file={__file__}"], 1, "records no answer"),
        (["serve", "--identity", __file__], 1, "is not private to this user"),
        (["serve", "--identity", "missing/identity"], 1, "/missing/identity: No such file or directory"),
        (["join"], 2, "--token-file"),
        (["join", "--token-file", "missing"], 1, "missing"),
        (["join", "rubbish"], 1, "not a join token"),
        (["status", "--url", "http://127.0.0.1:1"], 1, "mesh serve"),
        (["status", "--url", "127.0.0.1:1"], 2, "http://"),
    ],
)
def test_what_cannot_be_is_one_clear_line(arguments: list[str], code: int, reason: str) -> None:
    if arguments[0] == "serve":
        arguments = [*arguments, "--port", str(free_port("127.0.0.1"))]
    answer = run(*arguments)
    last = answer.stderr.splitlines()[-1]
    assert (answer.returncode, reason in answer.stderr) == (code, True), answer.stderr
    assert last.lower().startswith("error: ")
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""
