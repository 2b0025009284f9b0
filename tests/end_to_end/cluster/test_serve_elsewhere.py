"""A mesh on a system with nothing of Linux: one host that serves, and one that joins and is lost."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from mesh.cluster.addresses import free_port
from tests.support.hidden_linux import hidden_environment, refused
from tests.support.short_models import write_short

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.cluster,
    pytest.mark.model,
    pytest.mark.skipif(sys.platform != "linux", reason="what it hides is Linux's"),
]

MESH = str(Path(sys.executable).with_name("mesh"))


class Commands:
    """`mesh` processes to which Linux is hidden.

    Args:
        folder: For their files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = hidden_environment(folder)
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                [MESH, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment | {"XDG_CACHE_HOME": str(self._folder / name)},
            )
        self._started.append(process)
        return process

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def run(self, *arguments: str, text: str = "") -> str:
        """What it prints; it must succeed."""
        done = subprocess.run(
            [MESH, *arguments],
            input=text,
            capture_output=True,
            text=True,
            env=self._environment,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def close(self) -> None:
        for process in reversed(self._started):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(120)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    started = Commands(tmp_path)
    yield started
    started.close()


def until(condition: Callable[[], bool], log: Path, within_s: float = 180.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.1)


def is_healthy(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def alive(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that still run when the time is over."""
    deadline_s = time.monotonic() + within_s
    while left := [process for process in processes if runs(process)]:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    return left


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def model(smollm2_path: Path, tmp_path: Path) -> str:
    return str(write_short(smollm2_path, 6, tmp_path / "model.gguf"))


def test_one_host_serves_and_leaves_no_process(commands: Commands, model: str, tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    options = ["--port", str(port), "--advertise", "127.0.0.1", "--threads", "1", "--ctx-size", "256"]
    serving = commands.start("head", "serve", model, *options)
    until(lambda: is_healthy(url) or serving.poll() is not None, commands.log("head"))
    assert commands.run("chat", "--url", url, "--max-tokens", "4", text="Hello\n").strip()
    assert "6 layers, fast: ready" in commands.run("status", "--url", url)
    commands.run("doctor", "--url", url, "--port", str(port), "--advertise", "127.0.0.1")
    family = descendants(serving)
    assert len(family) > 3
    serving.send_signal(signal.SIGINT)
    assert serving.wait(120) == 130
    assert alive(family, 10) == []
    assert {"/proc/self/cgroup", "/dev/cpu_dma_latency"} <= refused(tmp_path)


def test_a_host_joins_and_ray_ends_with_it(commands: Commands, model: str, tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    url, token = f"http://127.0.0.1:{port}", tmp_path / "token"
    options = ["--port", str(port), "--advertise", "127.0.0.1", "--head-only", "--wait-for", "1"]
    options += ["--ctx-size", "256", "--token-file", str(token)]
    serving = commands.start("head", "serve", model, *options)
    until(lambda: token.exists() or serving.poll() is not None, commands.log("head"))
    options = ["--token-file", str(token), "--name", "host", "--threads", "1", "--memory", "2G"]
    joining = commands.start("host", "join", *options)
    until(lambda: is_healthy(url) or joining.poll() is not None, commands.log("host"))
    assert commands.run("chat", "--url", url, "--max-tokens", "4", text="Hello\n").strip()
    family = descendants(joining)
    assert len(family) > 1
    joining.kill()
    joining.wait(30)
    assert alive(family, 30) == []
    serving.send_signal(signal.SIGINT)
    assert serving.wait(120) == 130
