"""Threads that compute batches together, each kept on a processor of its own where they are as many.

Linux places a thread that wakes up without looking for a better processor where all of them are taken, also
if one is taken by what computes on idle processors only. So two threads that meet hundreds of times a token
can stay on one of two processors for seconds: beside the encoder of pictures a token of three sessions took
62 ms, and 21 with the threads kept apart, as many as without it. Where there are as many threads as
processors, no other places are better, whatever else computes.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_TASKS: Final = Path("/proc/self/task")


@contextmanager
def own_processors(num_threads: int) -> Iterator[None]:
    """Give each thread of a team that first computes in the block a processor of its own.

    Args:
        num_threads: Threads of the team, this one among them.
    """
    if sys.platform != "linux" or num_threads == 1:
        yield
        return
    own = threading.get_native_id()
    before = _threads()
    yield
    of_python = {each.native_id for each in threading.enumerate()}
    # Libraries name the threads that they keep for themselves; those of a team have the name of this one.
    began = (each for each in sorted(_threads() - before - of_python) if _name(each) == _name(own))
    team = [own, *began]
    # Others of the same name that began at the same time cannot be told from them.
    if len(team) == num_threads:
        keep_apart(team)


def keep_apart(team: list[int]) -> None:
    """Keep threads on processors of their own, if they are as many as this thread may use.

    Args:
        team: The kernel's ids of the threads.
    """
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) == len(team):
        # One may have ended, and it may be forbidden.
        with suppress(OSError):
            for thread_id, processor in zip(team, processors, strict=True):
                os.sched_setaffinity(thread_id, {processor})


def _threads() -> set[int]:
    with suppress(OSError):
        return {int(each.name) for each in _TASKS.iterdir()}
    return set()


def _name(thread_id: int) -> str:
    """The kernel's name of a thread: that of the thread which began it, unless it was given another one."""
    with suppress(OSError):
        return (_TASKS / str(thread_id) / "comm").read_text(encoding="utf-8", errors="replace")
    return ""
