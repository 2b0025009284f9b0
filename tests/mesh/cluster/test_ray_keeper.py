"""The keeper, with small daemons: it takes in what a command leaves behind, and lets nobody get away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")

# Starts two daemons in sessions of their own, one of which has a child that does not heed SIGTERM, and ends.
COMMAND = """
setsid sleep 100 & echo $! > "$0/first"
setsid sh -c 'trap "" TERM; sleep 100 & echo $! > "$0/stubborn"; wait' "$0" & echo $! > "$0/second"
while [ ! -s "$0/stubborn" ]; do sleep 0.01; done
echo started
"""


def keeper(*command: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "mesh.cluster.ray_reaper", "sleep", *command]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def daemons(folder: Path) -> list[int]:
    return [int((folder / name).read_text()) for name in ("first", "second", "stubborn")]


def test_all_end_when_the_keeper_is_told_to(tmp_path: Path) -> None:
    with keeper("/bin/sh", "-c", COMMAND, str(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.terminate()
        assert process.wait(120) == 0
    assert not any(map(psutil.pid_exists, daemons(tmp_path)))


def test_all_end_when_one_does(tmp_path: Path) -> None:
    with keeper("/bin/sh", "-c", COMMAND, str(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        first = daemons(tmp_path)[0]
        # Only once the keeper is its parent does it count as a daemon.
        while psutil.Process(first).ppid() != process.pid:
            assert process.poll() is None
        os.kill(first, signal.SIGKILL)
        assert process.stdout.readline() == f"process {first} of the Ray node ended with status -9\n"
        assert process.wait(120) == 1
    assert not any(map(psutil.pid_exists, daemons(tmp_path)))


def test_a_daemon_that_died_at_once_is_missed() -> None:
    with keeper("/bin/sh", "-c", "sleep 0") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "sleep of the Ray node ended while it started\n"
        assert process.wait(120) == 1


def test_a_command_that_fails_is_told_on() -> None:
    with keeper("/bin/sh", "-c", "exit 7") as process:
        assert process.wait(120) == 7
