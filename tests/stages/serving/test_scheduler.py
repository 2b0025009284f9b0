"""Runs of slots, and windows that are taken by them."""

from hypothesis import given
from hypothesis import strategies as st

from stages.serving.scheduler import WindowScheduler, run_around
from tests.stages.serving.test_stage_sessions import take, window


@given(
    rows_of=st.dictionaries(st.integers(0, 20), st.integers(1, 4), min_size=1),
    most_rows=st.integers(4, 32),
    data=st.data(),
)
def test_a_run_is_of_neighbours_with_equally_many_rows_and_divides_alike_for_all_of_them(
    rows_of: dict[int, int], most_rows: int, data: st.DataObject
) -> None:
    slot = data.draw(st.sampled_from(sorted(rows_of)))
    run = run_around(slot, rows_of, most_rows)
    assert slot in run
    assert {rows_of.get(each) for each in run} == {rows_of[slot]}
    assert len(run) * rows_of[slot] <= most_rows
    assert {run_around(each, rows_of, most_rows) for each in run} == {run}
    # Nobody is left out for whom there is room.
    if len(run) < most_rows // rows_of[slot]:
        assert rows_of.get(run.stop) != rows_of[slot]


def taken_from(scheduler: WindowScheduler) -> list[int]:
    work = take(scheduler)
    assert work is not None
    return [each.span.slot for each in work.windows]


def test_neighbours_are_taken_with_the_one_that_waited_longest() -> None:
    scheduler = WindowScheduler(64, lambda _session, _epoch: True, takes_runs=True)
    for slot in (5, 1, 7, 4, 2, 6):
        scheduler.put(window(slot, 1))
    assert taken_from(scheduler) == [4, 5, 6, 7]
    scheduler.put(window(3, 1))
    assert taken_from(scheduler) == [1, 2, 3]


def test_of_neighbours_only_those_of_one_bundle_are_taken() -> None:
    scheduler = WindowScheduler(64, lambda _session, _epoch: True, takes_runs=True)
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
