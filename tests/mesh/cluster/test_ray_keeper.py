"""The keeper, with small daemons: it takes in what a command leaves behind, and lets nobody get away."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from mesh.cluster.ray_reaper import Ownership

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")

# Starts two daemons in sessions of their own, one of which has a child that does not heed SIGTERM. It ends
# once the first is called `sleep`: a daemon of that name is needed.
COMMAND = """
setsid sleep 100 & echo $! > "$0/first"
setsid sh -c 'trap "" TERM; sleep 100 & echo $! > "$0/stubborn"; wait' "$0" & echo $! > "$0/second"
while [ ! -s "$0/stubborn" ]; do sleep 0.01; done
until grep -q sleep "/proc/$(cat "$0/first")/comm"; do sleep 0.01; done
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


# With the file that its owner locks, and the longest time without one.
OWNED = """
import sys
from pathlib import Path
from mesh.cluster.ray_reaper import Ownership, keep
sys.exit(keep(sys.argv[3:], "sleep", Ownership(Path(sys.argv[1]), float(sys.argv[2]))))
"""


def test_all_end_without_an_owner_but_not_when_the_name_of_its_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "owner"
    with path.open("wb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        command = ("/bin/sh", "-c", COMMAND, str(tmp_path))
        process = subprocess.Popen(
            [sys.executable, "-c", OWNED, str(path), "0.1", *command], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        # As a program does that removes old files.
        path.unlink()
        # It looks twice a second.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
    with process:
        assert process.stdout.readline() == "the Ray node has had no owner for too long\n"
        assert process.wait(120) == 0
    assert not any(map(psutil.pid_exists, daemons(tmp_path)))


def test_an_owner_that_comes_in_time_counts(tmp_path: Path) -> None:
    path = tmp_path / "owner"
    path.touch()
    ownership = Ownership(path, 10.0)
    assert not ownership.is_over(0.0)
    assert not ownership.is_over(9.9)
    with path.open("r+b") as owner:
        # Looking leaves no lock behind.
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not ownership.is_over(15.0)
    assert not ownership.is_over(16.0)
    assert ownership.is_over(26.0)
