"""A call in a process of its own that is stopped, goes on and is ended, by a handle."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

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

    # Before it starts, too.
    handle.stop()
    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.3)
    assert told == [0]
    handle.go_on()
    until(lambda: told[-1] > 3)
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


def test_a_process_that_is_ended_before_it_starts_computes_nothing() -> None:
    handle = ProcessHandle()
    handle.kill()
    told: list[Any] = []
    with pytest.raises(ProcessEnded) as ended:
        call(count, progress=told.append, handle=handle)
    assert ended.value.exit_code == -9
    assert told == []
