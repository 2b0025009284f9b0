"""`mesh serve` and `mesh join` as a user runs them: real processes, a real model, real signals."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from mesh.cluster.addresses import free_port
from mesh.cluster.join_token import decode, encode
from tests.support.hostile_modules import write_hostile_modules
from tests.support.promptness import quickest_s

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.model]

MESH = str(Path(sys.executable).with_name("mesh"))
CHAT = {
    "model": "default",
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 8,
    "temperature": 0,
}


@dataclass
class Running:
    """A `mesh` process."""

    process: subprocess.Popen[str]
    out: Path
    err: Path

    def descendants(self) -> set[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return set(psutil.Process(self.process.pid).children(recursive=True))
        return set()

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> tuple[int, list[str]]:
        """Exit code, and command lines of what is left of it."""
        processes = self.descendants()
        self.process.send_signal(number)
        code = self.process.wait(120)
        left = [process for process in processes if process.is_running() and process.status() != "zombie"]
        return code, [" ".join(process.cmdline())[:100] for process in left]

    def events(self) -> list[dict[str, Any]]:
        lines = self.err.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def saw(self, name: str, **wanted: object) -> bool:
        return any(
            event["event"] == name and all(event.get(key) == value for key, value in wanted.items())
            for event in self.events()
        )


@pytest.fixture
def mesh(tmp_path: Path, stage_cache_dir: Path) -> Iterator[Mesh]:
    running = Mesh(tmp_path, stage_cache_dir)
    yield running
    running.close()


class Mesh:
    """Starts `mesh` processes and ends them with the test.

    The folder that they are started in has modules that end whatever imports them.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder = folder
        self._cache = cache
        self._started: list[Running] = []
        self._project = write_hostile_modules(folder / "project")

    def start(self, *arguments: str, cache: str = "", output: int | None = None) -> Running:
        number = len(self._started)
        out, err = self._folder / f"{number}.out", self._folder / f"{number}.err"
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [MESH, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout if output is None else output,
                stderr=stderr if output is None else output,
                text=True,
                cwd=self._project,
                env=os.environ | {"XDG_CACHE_HOME": str(self._cache / cache)},
            )
        running = Running(process, out, err)
        self._started.append(running)
        return running

    def close(self) -> None:
        for running in reversed(self._started):
            if running.process.poll() is None:
                running.interrupt()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([MESH, *arguments], capture_output=True, text=True, check=False, timeout=60)


def until(condition: object, what: str, within_s: float = 180.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


def is_healthy(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    return False


def answers(port: int, key: str = "") -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    reply = httpx.post(url, json=CHAT, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def test_the_demo_answers_and_ctrl_c_leaves_no_process(mesh: Mesh) -> None:
    port = free_port("127.0.0.1")
    serving = mesh.start("serve", "--port", str(port), "--threads", "1", "--ctx-size", "512")
    until(lambda: is_healthy(port) or serving.process.poll() is not None, "the demo does not come up")
    assert answers(port)
    printed = serving.out.read_text()
    assert f"http://127.0.0.1:{port}/v1 in 2 stages" in printed
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in printed
    assert "mesh join " in printed
    url = f"http://127.0.0.1:{port}"
    status = json.loads(run("status", "--json", "--url", url).stdout)
    assert status["ready"] is True
    assert [stage["layers"][1] for stage in status["stages"]][-1] == 30
    assert len(status["stages"]) == 2
    table = run("status", "--url", url)
    assert table.returncode == 0
    assert "30 layers, fast: ready" in table.stdout
    assert len(serving.descendants()) > 4
    assert serving.interrupt() == (130, [])
    assert all(line.startswith("{") for line in serving.err.read_text().splitlines())
    assert not is_healthy(port)
    assert run("status", "--url", url).returncode == 1


def test_two_joined_hosts_serve_a_model_and_one_takes_over_from_the_other(mesh: Mesh, tmp_path: Path) -> None:
    port, token_path = free_port("127.0.0.1"), tmp_path / "token"
    keys = tmp_path / "keys"
    keys.write_text("# who may use it\nlaptop open-sesame\n")
    asked = [
        "--api-key-file",
        str(keys),
        "--head-only",
        "--wait-for",
        "2",
        "--split",
        "10,20",
        "--ctx-size",
        "512",
    ]
    serving = mesh.start("serve", "--port", str(port), *asked, "--token-file", str(token_path))
    until(token_path.exists, "no token file")
    assert token_path.stat().st_mode & 0o777 == 0o600
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503
    hosts = [
        mesh.start("join", "--token-file", str(token_path), "--name", name, "--threads", "1", cache=name)
        for name in ("a", "b")
    ]
    until(lambda: is_healthy(port) or serving.process.poll() is not None, "two hosts do not come up")
    assert answers(port, "open-sesame")
    url = f"http://127.0.0.1:{port}"
    locked = run("status", "--url", url)
    assert locked.returncode == 1
    assert "needs another API key" in locked.stderr

    def status_now() -> dict[str, Any]:
        answer = run("status", "--json", "--url", url, "--api-key-file", str(keys))
        status: dict[str, Any] = json.loads(answer.stdout)
        return status

    status = status_now()
    assert {host["name"] for host in status["hosts"]} == {"a", "b"}
    assert [stage["layers"] for stage in status["stages"]] == [[0, 10], [10, 30]]
    # A third is listed, as a spare; a second of the same name is refused.
    late = mesh.start("join", "--token-file", str(token_path), "--name", "late", "--memory", "3G")
    until(lambda: serving.saw("host_ready", host="late"), "the third host is not listed")
    hosts_now = status_now()["hosts"]
    assert [(host["layers"], host["memory_bytes"]) for host in hosts_now if host["name"] == "late"] == [
        ("", 3 * 2**30)
    ]
    refused = run("join", "--token-file", str(token_path), "--name", "a")
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("error: a host named 'a' is in the mesh already")
    assert late.interrupt() == (130, [])
    assert answers(port, "open-sesame")
    # One that holds layers leaves, but not before the other has taken them over.
    assert hosts[0].interrupt(signal.SIGTERM) == (0, [])
    assert [(host["name"], host["layers"]) for host in status_now()["hosts"]] == [("b", "[0, 10), [10, 30)")]
    assert answers(port, "open-sesame")
    # The head goes, and sends home who is left.
    left_behind = hosts[1].descendants()
    assert serving.interrupt() == (130, [])
    assert hosts[1].process.wait(120) == 0
    assert hosts[1].saw("head_says", state="the head closed the mesh")
    assert not [process for process in left_behind if process.is_running()]
    assert not token_path.exists()


@pytest.mark.sweep
@pytest.mark.parametrize("victim", [0, 1])
def test_a_head_that_dies_with_a_stage_is_followed_by_one_that_serves_all_layers(
    mesh: Mesh, tmp_path: Path, victim: int
) -> None:
    port, state = free_port("127.0.0.1"), tmp_path / "state.json"
    places = ("--port", str(port), "--advertise", "127.0.0.1", "--state", str(state), "--linger", "90")
    arguments = ("serve", *places, "--threads", "1", "--ctx-size", "512", "--stages", "2")

    def stages(head: Running) -> list[psutil.Process]:
        found = [each for each in head.descendants() if "StageActor" in " ".join(each.cmdline())]
        return sorted(found, key=lambda each: each.create_time())

    def recorded() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(state.read_bytes())["stages"]
        return found

    head = mesh.start(*arguments)
    until(lambda: is_healthy(port), "the first head does not serve")
    text = answers(port)
    until(lambda: len(recorded()) == 2, "the ring is not recorded")
    before, whole, family = stages(head), state.read_bytes(), head.descendants()
    # It outlives its head, and has the stages of the next one, too.
    raylet = before[0].parent()
    assert raylet is not None
    before[victim].kill()
    until(lambda: recorded() == [], "the ring is recorded while it is repaired", 30)
    head.process.kill()
    head.process.wait()
    if victim == 0:
        # What an earlier version recorded: the stages that ran at that moment.
        fields = json.loads(whole)
        state.write_text(json.dumps(fields | {"stages": fields["stages"][1:]}))
    following = mesh.start(*arguments)
    until(lambda: is_healthy(port), "the next head does not serve")
    assert answers(port) == text
    assert not following.saw("stages_taken_over")
    until(lambda: not any(each.is_running() for each in before), "a stage of the broken ring is left")
    family |= set(raylet.children(recursive=True))
    assert following.interrupt()[0] == 130
    until(lambda: not any(each.is_running() for each in family), "a process is left")
    assert not state.exists()


def test_a_head_that_waits_turns_strangers_away_within_5_s(mesh: Mesh, tmp_path: Path) -> None:
    token_path = tmp_path / "token"
    head = mesh.start(
        "serve", "--port", str(free_port("127.0.0.1")), "--wait-for", "1", "--token-file", str(token_path)
    )
    until(token_path.exists, "no token file")
    token = decode(token_path.read_text())
    bad = {
        "is not a join token": token_path.read_text()[:50],
        "not this mesh's": encode(type(token)(token.addresses, "guess", token.fingerprint, 2**39)),
        "certificate differs": encode(type(token)(token.addresses, token.secret, bytes(32), 2**39)),
        "cannot reach the head": encode(
            type(token)((f"127.0.0.1:{free_port('127.0.0.1')}",), token.secret, token.fingerprint, 2**39)
        ),
    }

    def attempt(reason: str, text: str) -> float:
        start_s = time.monotonic()
        answer = run("join", text)
        assert answer.returncode == 1
        assert reason in answer.stderr.splitlines()[-1]
        assert answer.stderr.splitlines()[-1].startswith("error: ")
        return time.monotonic() - start_s

    for reason, text in bad.items():
        assert quickest_s(functools.partial(attempt, reason, text), 5) < 5
    assert head.interrupt(signal.SIGTERM) == (0, [])
    assert not token_path.exists()


@pytest.mark.parametrize(
    "stage_of_life",
    [
        pytest.param({}, id="at once"),
        # The sweep has what is much alike; loading begins milliseconds after the plan.
        pytest.param({"event": "ray_started"}, id="ray has started", marks=pytest.mark.sweep),
        pytest.param({"event": "planned"}, id="planned", marks=pytest.mark.sweep),
        pytest.param({"event": "phase", "phase": "loading"}, id="loading"),
    ],
)
def test_ctrl_c_at_any_moment_leaves_nothing(mesh: Mesh, stage_of_life: dict[str, str]) -> None:
    serving = mesh.start("serve", "--port", str(free_port("127.0.0.1")), "--ctx-size", "512", cache="fresh")
    if stage_of_life:
        until(lambda: serving.saw(stage_of_life["event"], **stage_of_life), "that moment never comes")
    else:
        until(lambda: len(serving.descendants()) > 0, "no Ray process")
    assert serving.interrupt() == (130, [])
    assert [line for line in serving.err.read_text().splitlines() if not line.startswith("{")] == []


@pytest.mark.usefixtures("heeded_hang_ups")
def test_a_closed_terminal_ends_it_too(mesh: Mesh) -> None:
    reader, writer = os.pipe()
    serving = mesh.start("serve", "--port", str(free_port("127.0.0.1")), "--ctx-size", "512", output=writer)
    os.close(writer)
    with os.fdopen(reader) as lines:
        while "ray_started" not in lines.readline():
            pass
    assert serving.interrupt(signal.SIGHUP) == (0, [])
