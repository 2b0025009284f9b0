"""Runs of slots that are computed in one pass, and the slots that pad them."""

from hypothesis import given
from hypothesis import strategies as st

from stages.runtime.spans import Run, RunPlanner, run_around

# One thread, AVX-512, seven layers of a model with 1.1 billion parameters in Q4_0; microseconds.
US_OF = {1: 28e3, 2: 50e3, 3: 65e3, 4: 41e3, 5: 63e3, 6: 78e3, 7: 90e3, 8: 80e3}


def planner(us_of: dict[int, float], num_slots: int = 16, most_rows: int = 64) -> RunPlanner:
    """One that has measured runs of one row for each slot."""
    found = RunPlanner(num_slots, most_rows)
    for num_rows, elapsed_us in us_of.items():
        for _ in range(3):
            found.learn(Run(range(num_rows), 1, num_rows), elapsed_us)
    return found


def slots_of(runs: list[Run]) -> list[range]:
    return [run.slots for run in runs]


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
    # No slot is left out for which there is room.
    if len(run) < most_rows // rows_of[slot]:
        assert rows_of.get(run.stop) != rows_of[slot]


@given(
    slots=st.sets(st.integers(0, 15), min_size=1),
    num_rows=st.integers(1, 8),
    full=st.sets(st.integers(0, 15)),
    us_of=st.dictionaries(st.integers(1, 16), st.floats(1.0, 1e6)),
)
def test_every_slot_is_in_one_run_that_fits_and_pads_only_where_there_is_room(
    slots: set[int], num_rows: int, full: set[int], us_of: dict[int, float]
) -> None:
    runs = planner(us_of).plan(sorted(slots), num_rows, lambda slot: 0 if slot in full else 100)
    in_runs = [slot for run in runs for slot in run.slots]
    # Padding of several runs may be one slot.
    assert sorted(slot for slot in in_runs if slot in slots) == sorted(slots)
    assert set(in_runs) <= set(range(16))
    assert not (set(in_runs) - slots) & full
    for run in runs:
        assert set(run.slots) & slots
        assert run.size <= 64
        assert run.num_rows == num_rows or len(run.slots) == 1
        assert run.num_rows >= num_rows
        if len(run.slots) == 1 and run.slots.start in full:
            assert run.num_rows == num_rows


def test_before_anything_is_measured_nothing_is_padded() -> None:
    runs = planner({}).plan([0, 1, 3, 4, 5, 9], 1, lambda _slot: 100)
    assert slots_of(runs) == [range(2), range(3, 6), range(9, 10)]
    assert {run.num_rows for run in runs} == {1}


def test_a_slot_beside_others_pads_their_run() -> None:
    padding = planner(US_OF)
    assert slots_of(padding.plan([2, 3, 4], 1, lambda _slot: 100)) == [range(2, 6)]
    assert slots_of(padding.plan([13, 14, 15], 1, lambda _slot: 100)) == [range(12, 16)]
    # Slot 5 is full, so the one before pads.
    assert slots_of(padding.plan([2, 3, 4], 1, lambda slot: 0 if slot == 5 else 100)) == [range(1, 5)]
    assert slots_of(padding.plan([2, 3, 4], 1, lambda _slot: 0)) == [range(2, 5)]
    # Eight rows are no faster than five.
    assert slots_of(padding.plan([2, 3, 4, 5, 6], 1, lambda _slot: 100)) == [range(2, 7)]


def test_runs_become_one_over_a_slot_between_them() -> None:
    padding = planner(US_OF)
    assert slots_of(padding.plan([0, 1, 3], 1, lambda _slot: 100)) == [range(4)]
    assert slots_of(padding.plan([0, 2, 3, 5, 6, 7], 1, lambda _slot: 100)) == [range(8)]
    assert slots_of(padding.plan([0, 1, 3], 1, lambda slot: 0 if slot == 2 else 100)) == [
        range(2),
        range(3, 4),
    ]
    # One far away stays alone.
    assert slots_of(padding.plan([0, 1, 2, 3, 9], 1, lambda _slot: 100)) == [range(4), range(9, 10)]


def test_where_rows_cost_alike_slots_between_runs_stay_empty() -> None:
    linear = planner({num_rows: 3e3 * num_rows for num_rows in range(1, 17)})
    assert slots_of(linear.plan([0, 1, 3, 5, 6, 7], 1, lambda _slot: 100)) == [
        range(2),
        range(3, 4),
        range(5, 8),
    ]


def test_a_window_of_one_session_is_padded_behind_its_own_rows() -> None:
    padding = RunPlanner(4, 64)
    for num_rows in (3, 4):
        for _ in range(3):
            padding.learn(Run(range(1), num_rows, num_rows), US_OF[num_rows])
    assert padding.plan([1], 3, lambda _slot: 1) == [Run(range(1, 2), 4, 3)]
    assert padding.plan([1], 3, lambda _slot: 0) == [Run(range(1, 2), 3, 3)]
