"""Children that end with their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from mesh.util.dependent_child import run_dependent

if TYPE_CHECKING:
    from pathlib import Path

CHILD = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""
PARENT = """
import pathlib, subprocess, sys, time
from mesh.util.dependent_child import run_dependent
if len(sys.argv) > 2:  # the parent is slow between the start of a child and the next instruction
    start = subprocess.Popen._execute_child
    def execute(*arguments):
        start(*arguments)
        while not pathlib.Path(sys.argv[2]).exists():
            time.sleep(0.01)
    subprocess.Popen._execute_child = execute
run_dependent("sleeper", sys.argv[1], timeout_s=600)
"""


def until_read(path: Path) -> str:
    deadline_s = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return path.read_text()


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("how", ["asked", "asked while it starts a child", "killed"])
def test_a_child_ends_with_its_parent(how: str, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(CHILD)
    goes_on = tmp_path / "goes on"
    arguments = [tmp_path / "pid", *[goes_on] * ("starts" in how)]
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    ) as parent:
        child = psutil.Process(int(until_read(tmp_path / "pid")))
        assert child.ppid() == parent.pid
        parent.send_signal(signal.SIGKILL if how == "killed" else signal.SIGINT)
        goes_on.touch()
        parent.wait(30)
    deadline_s = time.monotonic() + (10 if how == "killed" else 0)
    while is_alive(child):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_module_has_its_own_arguments_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo.py").write_text("import sys; print(*sys.argv[1:]); sys.exit('no more')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run_dependent("echo", "one", "two", timeout_s=30)
    assert (done.returncode, done.stdout, done.stderr) == (1, "one two\n", "no more\n")
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired):
        run_dependent("slow", timeout_s=0.1)
    assert not [child for child in psutil.Process().children() if "slow" in child.cmdline()]
