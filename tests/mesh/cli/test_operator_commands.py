"""An operator's commands against a mesh that is really served, on pipes and on terminals."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from mesh.cluster.addresses import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.sociable, pytest.mark.model]

MESH = str(Path(sys.executable).with_name("mesh"))
COLUMNS = "160"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, stage_cache_dir: Path) -> Iterator[Served]:
    """Two stages on one host, behind a key."""
    folder, port = tmp_path_factory.mktemp("operator"), free_port("127.0.0.1")
    (folder / "keys").write_text("me open-sesame\n")
    options = ["--port", str(port), "--advertise", "127.0.0.1", "--name", "alpha", "--stages", "2", "--exact"]
    options += ["--ctx-size", "512", "--parallel", "2", "--threads", "1", "--speculate", "ngram"]
    out, err = folder / "out", folder / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            [MESH, "serve", *options, "--api-key-file", str(folder / "keys")],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=os.environ | {"XDG_CACHE_HOME": str(stage_cache_dir)},
        )
    try:
        deadline_s = time.monotonic() + 120
        while "Ctrl-C stops it" not in out.read_text():
            assert process.poll() is None, err.read_text()
            assert time.monotonic() < deadline_s, err.read_text()
            time.sleep(0.2)
        yield Served(f"http://127.0.0.1:{port}", out)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


class Served:
    def __init__(self, url: str, out: Path) -> None:
        self.url = url
        self.out = out

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [MESH, *arguments, "--url", self.url],
            input=stdin,
            env=os.environ | {"MESH_API_KEY": "open-sesame", "COLUMNS": COLUMNS},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, argv: list[str]) -> None:
        self.shown = ""
        self._pid, self._fd = pty.fork()
        if not self._pid:
            os.environ.update(MESH_API_KEY="open-sesame", TERM="xterm", COLUMNS=COLUMNS, LINES="40")
            os.execv(argv[0], argv)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, pattern: str, within_s: float = 60.0) -> None:
        """Read on until what is new matches."""
        start, deadline_s = len(self.shown), time.monotonic() + within_s
        while not re.search(pattern, self.shown[start:]):
            assert time.monotonic() < deadline_s, self.shown
            if select.select([self._fd], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:
                    assert re.search(pattern, self.shown[start:]), self.shown
                    return

    def code(self, within_s: float = 20.0) -> int:
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:
                    break
        _, status = os.waitpid(self._pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)


def test_the_join_line_says_what_must_be_open(served: Served) -> None:
    printed = served.out.read_text()
    assert re.search(r"  mesh join \S+\n\nThe first connection is TCP to 127\.0\.0\.1:\d+\.", printed)


def test_a_plan_for_its_hosts_is_timed_on_them(served: Served, smollm2_path: Path) -> None:
    asked = [
        "plan",
        str(smollm2_path),
        "--stages",
        "2",
        "--exact",
        "--prompt-tokens",
        "40",
        "--ctx-size",
        "512",
    ]
    done = served.run(*asked, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [stage["host"] for stage in found["stages"]] == ["alpha", "alpha"]
    assert found["basis"].startswith("computing was timed on every host")
    assert all(0 < stage["row_ms"] < stage["chunk_ms"] for stage in found["stages"])
    predicted = found["prediction"]
    assert (predicted["wire_ms"], predicted["prompt_tokens"]) == (0.0, 40)
    assert predicted["tokens_per_s"] > 1
    # The mesh goes on as before.
    assert json.loads(served.run("status", "--json").stdout)["ready"] is True


def test_a_host_that_left_cannot_be_timed(served: Served) -> None:
    blank = {"header": "", "num_bytes": 1}
    answer = httpx.post(
        f"{served.url}/mesh/rehearse",
        json={"hosts": [{"host": "gone", "orders": [{"blank": blank}]}]},
        headers={"Authorization": "Bearer open-sesame"},
        timeout=60,
    )
    assert answer.json()["hosts"][0]["failure"] == "host gone is not in the mesh, or not ready"


def test_a_header_that_is_none_harms_nobody(served: Served) -> None:
    blank = {"header": "R0dVRgMAAAA=", "num_bytes": 4096}
    answer = httpx.post(
        f"{served.url}/mesh/rehearse",
        json={"hosts": [{"host": "alpha", "orders": [{"blank": blank}]}]},
        headers={"Authorization": "Bearer open-sesame"},
        timeout=60,
    )
    assert "does not load" in answer.json()["hosts"][0]["failure"]
    assert json.loads(served.run("status", "--json").stdout)["ready"] is True


def test_the_doctor_looks_at_hosts_files_and_clocks(served: Served) -> None:
    done = served.run("doctor", "--json", "--port", str(free_port("127.0.0.1")))
    checks: list[dict[str, Any]] = json.loads(done.stdout)
    assert [check for check in checks if check["outcome"] == "fail"] == []
    assert done.returncode == 0
    of_alpha = {check["what"]: check for check in checks if check["where"] == "alpha"}
    assert re.search(r"spanmesh \S+, protocol \d+, python 3", of_alpha["versions"]["detail"])
    assert "CPU" in of_alpha["device"]["detail"]
    assert abs(float(of_alpha["clock"]["detail"].split()[0])) < 1000
    files = [check for check in of_alpha.values() if check["what"].startswith("stage file")]
    assert [check["detail"] for check in files] == ["matches its hash"] * 2
    assert all(check["fix"] for check in checks if check["outcome"] != "ok")
    shown = served.run("doctor")
    assert "llama.cpp computes on" in shown.stdout
    # The API's port is taken, by the mesh.
    assert re.search(r"\d+ passed, \d+ warnings, 0 failed", shown.stdout)


def test_the_doctor_fails_where_no_mesh_is() -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    done = subprocess.run(
        [MESH, "doctor", "--url", url], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert "FAIL answer: no mesh answers" in done.stdout


def test_top_shows_stages_once_and_draws_on_a_terminal(served: Served) -> None:
    done = served.run("top", "--once", "--every", "0.3")
    assert done.returncode == 0, done.stderr
    assert re.search(r"0 +alpha +\[0, \d+\)", done.stdout)
    assert "speculation: ngram" in done.stdout
    refused = served.run("top")
    assert refused.returncode == 2
    assert "use --once" in refused.stderr
    terminal = Terminal([MESH, "top", "--url", served.url, "--every", "0.3", "--no-links"])
    terminal.until("compute ms")
    terminal.type("\x03")
    assert terminal.code() == 0


def test_a_chat_on_pipes_keeps_what_was_said(served: Served) -> None:
    lines = "My name is Ada.\n/show\n/stats\n/clear\n/show\n/nonsense\n"
    done = served.run("chat", "--temperature", "0", "--max-tokens", "12", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "user: My name is Ada." in done.stdout
    assert "assistant: " in done.stdout
    assert re.search(r"tokens/s; \d+ prompt tokens, \d+ of them cached; 12 written", done.stdout)
    assert done.stdout.endswith("(new chat)\nunknown command /nonsense; /help lists all\n")


def test_a_chat_on_a_terminal_streams_stops_and_goes_on(served: Served) -> None:
    terminal = Terminal([MESH, "chat", "--url", served.url, "--temperature", "0", "--max-tokens", "400"])
    terminal.until("> ")
    terminal.type("/set ignore_eos true\n")
    terminal.until("> ")
    terminal.type("Tell me a long story about the sea.\n")
    terminal.until(r"sea\.\r\n(?s:.){20,}")
    terminal.type("\x03")
    terminal.until(r"\(stopped\)(?s:.)*> ")
    # The mesh has heard of it.
    deadline_s = time.monotonic() + 10
    while json.loads(served.run("status", "--json").stdout)["sessions"]["running"]:
        assert time.monotonic() < deadline_s
    terminal.type("\x03")
    terminal.until(r"ends the chat\)")
    terminal.type("/quit\n")
    assert terminal.code() == 0


def test_a_chat_without_the_key_says_so(served: Served) -> None:
    done = subprocess.run(
        [MESH, "chat", "--url", served.url],
        input="Hello\n",
        env={name: value for name, value in os.environ.items() if name != "MESH_API_KEY"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "error: the server answered 401: this server needs an API key" in done.stdout
