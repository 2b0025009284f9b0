"""Whoever follows examples/three_hosts.md on three hosts sees what it says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from meshbench.lab.network import Lab
from tests.support.lab_fixtures import require_lab
from tests.support.walk_through import EXAMPLES, THREE_HOSTS, Step, differences, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

HOSTS = ("alpha", "beta", "gamma")
ALPHA, BETA, GAMMA = range(3)
# What stands under "Before" is run in tests/mesh/cli/test_readme.py, on one host.
WHERE = {"On alpha": ALPHA, "On beta and gamma": BETA, "Anywhere": GAMMA, "A host more, a host less": ALPHA}
OURS = {"MESH_SERVE_THREADS": "1", "MESH_JOIN_THREADS": "1"}
PLAIN = {"COLUMNS": "110", "NO_COLOR": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


class Terminal:
    """A command on a terminal of a lab's host."""

    def __init__(self, lab: Lab, host: int, command: str, folder: Path, env: Mapping[str, str]) -> None:
        ours, theirs = os.openpty()
        # Where bars are drawn, a line is not there to stay; a dumb terminal has none, and 80 columns.
        draws_bars = command.startswith("mesh serve")
        self.process = lab.run(
            host,
            ["bash", "-c", f"exec {command}"],
            env={**PLAIN, **OURS, **env, "TERM": "dumb" if draws_bars else "xterm"},
            cwd=folder,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self._read: list[bytes] = []
        self._reader = threading.Thread(target=self._read_all, args=(ours,), daemon=True)
        self._reader.start()

    @property
    def shown(self) -> str:
        text = b"".join(self._read).decode(errors="replace").replace("\r\n", "\n")
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)

    def until(self, is_there: Callable[[str], bool], within_s: float = 180.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not is_there(self.shown):
            assert self.process.poll() is None, self.shown
            assert time.monotonic() < deadline_s, self.shown
            time.sleep(0.1)

    def code(self, within_s: float = 180.0) -> int:
        code = self.process.wait(within_s)
        self._reader.join(5)
        return code

    def _read_all(self, fd: int) -> None:
        with suppress(OSError):
            while chunk := os.read(fd, 65536):
                self._read.append(chunk)
        os.close(fd)


class Walk:
    """One who types what the document says, and keeps all terminals open."""

    def __init__(self, lab: Lab, folder: Path, model: Path) -> None:
        self._lab = lab
        self._folders = [folder / name for name in HOSTS]
        for host, (name, own) in enumerate(zip(HOSTS, self._folders, strict=True)):
            own.mkdir()
            (own / "examples").symlink_to(EXAMPLES)
            assert lab.exec(host, ["hostname", name]).returncode == 0
        (self._folders[ALPHA] / "model.gguf").symlink_to(model)
        self._env: dict[str, str] = {}
        self.terminals: list[tuple[Step, Terminal]] = []

    def take(self, step: Step) -> None:
        words = step.command.split()
        if words[:2] == ["mesh", "serve"]:
            self._serve(step)
        elif words[:2] == ["mesh", "join"]:
            self._join(step)
        else:
            self._run(step)

    def opened(self, command: str) -> list[Terminal]:
        return [terminal for step, terminal in self.terminals if step.command.startswith(command)]

    def _serve(self, step: Step) -> None:
        token = self._folders[ALPHA] / "token.txt"
        self._type(step, ALPHA).until(lambda shown: "mesh join " in shown and token.exists())
        for other in (BETA, GAMMA):
            shutil.copy(token, self._folders[other])

    def _join(self, step: Step) -> None:
        joins = [self._type(step, host) for host in (BETA, GAMMA)]
        self.opened("mesh serve")[0].until(lambda shown: "Ctrl-C stops it" in shown)
        for terminal in joins:
            terminal.until(lambda shown: "state=serving" in shown)

    def _run(self, step: Step) -> None:
        deadline_s = time.monotonic() + 60
        while True:
            terminal = self._type(step, WHERE[step.section])
            assert terminal.code() == 0, terminal.shown
            if key := re.search(r"^sk-mesh-\S+", terminal.shown, re.MULTILINE):
                self._env["MESH_API_KEY"] = key[0]
            # An eviction is repaired a moment later.
            is_as_told = changed(step, terminal.shown) == []
            if step.command != "mesh status" or is_as_told or time.monotonic() > deadline_s:
                return
            self.terminals.pop()
            time.sleep(1)

    def _type(self, step: Step, host: int) -> Terminal:
        command = (
            step.command.replace("10.77.0.2", self._lab.address(host)) if host == GAMMA else step.command
        )
        terminal = Terminal(self._lab, host, command, self._folders[host], self._env)
        self.terminals.append((step, terminal))
        return terminal


def changed(step: Step, shown: str) -> list[str]:
    """As `differences`, but for what a model says: of its answer, only how fast it came."""
    if "stream_usage.py" not in step.command:
        return differences(step.recorded, shown)
    recorded = "\n".join(step.recorded).rpartition("\n\n")[2]
    return differences(tuple(recorded.splitlines()), shown.rpartition("\n\n")[2])


def test_three_hosts_print_what_the_walk_through_says(smollm2_path: Path, tmp_path: Path) -> None:
    require_lab()
    steps = [step for step in steps_of(THREE_HOSTS) if step.section != "Before"]
    assert {step.section for step in steps} == set(WHERE)
    with Lab(len(HOSTS), 5.0, shared=[tmp_path]) as lab:
        walk = Walk(lab, tmp_path, smollm2_path)
        try:
            for step in steps:
                walk.take(step)
            (serve,), (beta, gamma) = walk.opened("mesh serve"), walk.opened("mesh join")
            assert (beta.code(), gamma.code()) == (0, 1)  # drained, evicted
            os.killpg(serve.process.pid, signal.SIGINT)
            assert serve.code() == 130
        finally:
            for step, terminal in walk.terminals:
                print(f"--- {step.section}: {step.command}\n{terminal.shown}")
        for step, terminal in walk.terminals:
            assert step.recorded
            assert changed(step, terminal.shown) == [], step.command
