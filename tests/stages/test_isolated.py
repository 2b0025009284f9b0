"""A call in a process of its own that is stopped, goes on and is ended, by a handle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from stages.isolated import ProcessEnded, ProcessHandle, call

if TYPE_CHECKING:
    from collections.abc import Callable

TICK_S = 0.01


def count(report: Callable[..., None]) -> None:
    number = 0
    while True:
        number += 1
        report(number)
        time.sleep(TICK_S)


def until(is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(TICK_S)


def test_a_process_stands_still_goes_on_and_ends() -> None:
    handle, told, ended = ProcessHandle(), [0], []

    def run() -> None:
        try:
            call(count, progress=told.append, handle=handle)
        except ProcessEnded as error:
            ended.append(error.exit_code)

    # Before it starts, too: with its first message.
    handle.stop()
    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: told[-1] > 0)
    time.sleep(5 * TICK_S)
    latest = told[-1]
    time.sleep(10 * TICK_S)
    assert told[-1] == latest
    handle.go_on()
    until(lambda: told[-1] > latest + 3)
    handle.stop()
    assert handle.is_stopped

    def stands_still() -> bool:
        before = told[-1]
        time.sleep(10 * TICK_S)
        return told[-1] == before

    # What was on its way comes.
    until(stands_still)
    assert stands_still()
    latest = told[-1]
    handle.go_on()
    until(lambda: told[-1] > latest)
    handle.stop()
    handle.kill()
    thread.join(20.0)
    assert ended == [-9]
    # Its id may be another process's by now.
    handle.kill()


PARENT = """
import os, threading, time
from stages.isolated import ProcessHandle, call
from tests.stages.test_isolated import count

if __name__ == "__main__":
    # As a service, whose processes no terminal hangs up on.
    os.setsid()
    handle = ProcessHandle()
    handle.stop()
    threading.Thread(target=call, args=(count,), kwargs={"handle": handle}, daemon=True).start()
    while handle._pid is None:
        time.sleep(0.001)
    print(handle._pid, flush=True)
    time.sleep(60)
"""


def test_a_process_that_is_to_stop_at_once_does_not_outlive_its_parent(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": root}
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_process_that_is_ended_before_it_starts_computes_nothing() -> None:
    handle = ProcessHandle()
    handle.kill()
    told: list[Any] = []
    with pytest.raises(ProcessEnded) as ended:
        call(count, progress=told.append, handle=handle)
    assert ended.value.exit_code == -9
    assert told == []
