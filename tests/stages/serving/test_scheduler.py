"""Runs of slots, and windows that are taken by them."""

from hypothesis import given
from hypothesis import strategies as st

from stages.serving.scheduler import WindowScheduler, run_around
from tests.stages.serving.test_stage_sessions import window


@given(
    rows_of=st.dictionaries(st.integers(0, 20), st.integers(1, 4), min_size=1),
    most_slots=st.integers(1, 8),
    most_rows=st.integers(4, 32),
    data=st.data(),
)
def test_a_run_is_of_neighbours_with_equally_many_rows_and_divides_alike_for_all_of_them(
    rows_of: dict[int, int], most_slots: int, most_rows: int, data: st.DataObject
) -> None:
    slot = data.draw(st.sampled_from(sorted(rows_of)))
    run = run_around(slot, rows_of, most_slots, most_rows)
    assert slot in run
    assert {rows_of.get(each) for each in run} == {rows_of[slot]}
    assert len(run) <= most_slots
    assert len(run) * rows_of[slot] <= most_rows
    assert {run_around(each, rows_of, most_slots, most_rows) for each in run} == {run}
    # Nobody is left out for whom there is room.
    if len(run) < min(most_slots, most_rows // rows_of[slot]):
        assert rows_of.get(run.stop) != rows_of[slot]


def taken_from(scheduler: WindowScheduler) -> list[int]:
    work = scheduler.take()
    assert work is not None
    return [each.span.slot for each in work.windows]


def test_neighbours_are_taken_with_the_one_that_waited_longest() -> None:
    scheduler = WindowScheduler(64, lambda _session, _epoch: True, takes_runs=True)
    for slot in (5, 1, 7, 4, 2, 6):
        scheduler.put(window(slot, 1))
    assert taken_from(scheduler) == [4, 5, 6, 7]
    scheduler.put(window(3, 1))
    assert taken_from(scheduler) == [1, 2, 3]


def test_no_more_are_taken_than_any_of_them_allows() -> None:
    scheduler = WindowScheduler(64, lambda _session, _epoch: True, takes_runs=True)
    for slot in (3, 2, 1, 0):
        scheduler.put(window(slot, 1, most_together=3 if slot else 2))
    assert [taken_from(scheduler) for _ in range(2)] == [[2, 3], [0, 1]]
