"""Runs of slots, and windows that are taken by them."""

from functools import partial

from stages.runtime.spans import run_around
from stages.serving.scheduler import WindowScheduler
from tests.stages.serving.test_stage_sessions import take, window


def taken_from(scheduler: WindowScheduler) -> list[int]:
    work = take(scheduler)
    assert work is not None
    return [each.span.slot for each in work.windows]


def test_neighbours_are_taken_with_the_one_that_waited_longest() -> None:
    scheduler = WindowScheduler(64, lambda _session, _epoch: True, run_of=partial(run_around, most_rows=64))
    for slot in (5, 1, 7, 4, 2, 6):
        scheduler.put(window(slot, 1))
    assert taken_from(scheduler) == [4, 5, 6, 7]
    scheduler.put(window(3, 1))
    assert taken_from(scheduler) == [1, 2, 3]


def test_of_neighbours_only_those_of_one_bundle_are_taken() -> None:
    scheduler = WindowScheduler(64, lambda _session, _epoch: True, run_of=partial(run_around, most_rows=64))
    scheduler.put(window(3, 1, bundle=1), window(2, 1, bundle=1))
    scheduler.put(window(1, 1, bundle=2), window(0, 1, bundle=2))
    assert [taken_from(scheduler) for _ in range(2)] == [[2, 3], [0, 1]]


def test_windows_that_wait_count_from_their_arrival_on() -> None:
    scheduler = WindowScheduler(64, lambda _session, _epoch: True)
    scheduler.put(*(window(slot, 1) for slot in range(5)))
    scheduler.put(window(5, 1, bundle=1))
    assert len(scheduler) == 6
    assert taken_from(scheduler) == [0, 1, 2, 3, 4]
    assert len(scheduler) == 1
