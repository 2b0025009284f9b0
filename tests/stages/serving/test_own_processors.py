"""Threads that compute together: each on a processor of its own, and no other thread bound."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from stages.process_limits import num_usable
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.serving.own_processors import _threads, own_processors
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads")


def bound(model: Path, num_threads: int) -> list[set[int]]:
    """Processors of the threads that compute a model, and of those that only begin meanwhile."""
    found: list[set[int]] = []

    def compute() -> None:
        runtime = StageRuntime(model, RuntimeOptions(num_slots=1, ctx_size=64, num_threads=num_threads))
        before = _threads()
        with own_processors(num_threads):
            runtime.decode([Span(0, 0, [5])])
        runtime.decode([Span(0, 1, [5])])
        team = {threading.get_native_id()} | (_threads() - before)
        found.extend(os.sched_getaffinity(each) for each in team)
        runtime.close()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return TinyModel("llama", n_layers=2).write(tmp_path / "model.gguf")


@pytest.mark.skipif(num_usable() == 1, reason="there is one processor")
def test_as_many_threads_as_processors_have_one_each(model: Path) -> None:
    mine = os.sched_getaffinity(0)
    found = bound(model, len(mine))
    assert sorted(found, key=min) == [{each} for each in sorted(mine)]
    assert os.sched_getaffinity(0) == mine


def test_fewer_or_more_threads_are_placed_by_the_system(model: Path) -> None:
    mine = os.sched_getaffinity(0)
    for num_threads in (1, len(mine) + 1):
        assert all(each == mine for each in bound(model, num_threads))


@pytest.mark.skipif(num_usable() == 1, reason="there is one processor")
def test_other_threads_that_begin_meanwhile_are_not_bound() -> None:
    """As many as a team has, as where a GPU computes, which takes no team."""
    mine, ends = os.sched_getaffinity(0), threading.Event()
    others = [threading.Thread(target=ends.wait) for _ in range(len(mine) - 1)]
    try:
        with own_processors(len(mine)):
            for each in others:
                each.start()
        found = [os.sched_getaffinity(each.native_id or 0) for each in others]
        assert [*found, os.sched_getaffinity(0)] == [mine] * len(mine)
    finally:
        os.sched_setaffinity(0, mine)
        ends.set()
