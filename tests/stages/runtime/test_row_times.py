"""Sizes to which padding a batch saves time, found by measuring."""

from hypothesis import given
from hypothesis import strategies as st

from stages.runtime.spans import RowTimes

MOST_ROWS = 64


def run(times: RowTimes, num_rows: int, us_of: dict[int, float]) -> int:
    """One batch of `num_rows` needed rows, padded as `times` says; returns its rows."""
    size = times.padded(num_rows, MOST_ROWS)
    times.add(size, us_of[size], num_needed=num_rows)
    return size


def test_a_size_that_is_faster_is_found_and_kept() -> None:
    times, us_of = RowTimes(), {3: 65.0, 4: 41.0}
    assert [run(times, 3, us_of) for _ in range(3)] == [3, 3, 3]
    assert {run(times, 3, us_of) for _ in range(60)} == {4}


def test_a_size_that_is_slower_is_tried_and_left() -> None:
    times, us_of = RowTimes(), {5: 63.0, 8: 80.0}
    assert [run(times, 5, us_of) for _ in range(6)] == [5, 5, 5, 8, 8, 8]
    assert {run(times, 5, us_of) for _ in range(200)} == {5}


def test_what_was_padded_for_long_is_measured_without_again() -> None:
    times, us_of = RowTimes(), {3: 65.0, 4: 41.0}
    for _ in range(10):
        run(times, 3, us_of)
    # As where other processes leave the cache to this one.
    us_of[3] = 20.0
    sizes = [run(times, 3, us_of) for _ in range(100)]
    assert sizes[:50] == [4] * 50
    assert sizes[-20:] == [3] * 20


def test_one_row_whole_tiles_and_full_batches_are_never_padded() -> None:
    times = RowTimes()
    for num_rows in (1, 4, 8, MOST_ROWS - 2, MOST_ROWS):
        for _ in range(10):
            times.add(num_rows, 1000.0, num_needed=num_rows)
    assert [times.padded(num_rows, MOST_ROWS) for num_rows in (1, 4, 8, MOST_ROWS)] == [1, 4, 8, MOST_ROWS]
    assert times.padded(MOST_ROWS - 2, MOST_ROWS - 1) == MOST_ROWS - 2


def test_a_time_that_was_disturbed_counts_little() -> None:
    times = RowTimes()
    # The first one waited for the disk.
    for elapsed_us in (500.0, 50.0, 50.0, 5000.0):
        times.add(2, elapsed_us, num_needed=2)
    assert 50.0 <= (times.us(2) or 0.0) < 60.0


@given(
    known=st.dictionaries(st.integers(1, 40), st.floats(1.0, 1e6), min_size=1), num_rows=st.integers(1, 60)
)
def test_unknown_times_lie_between_their_neighbours(known: dict[int, float], num_rows: int) -> None:
    times = RowTimes()
    assert times.us(num_rows) is None
    for rows, elapsed_us in known.items():
        times.add(rows, elapsed_us, num_needed=rows)
    found = times.us(num_rows)
    assert found is not None
    below, above = [r for r in known if r <= num_rows], [r for r in known if r >= num_rows]
    if below and above:
        ends = known[max(below)], known[min(above)]
        assert min(ends) - 1e-6 <= found <= max(ends) + 1e-6
    else:
        nearest = max(below) if below else min(above)
        assert abs(found - known[nearest] * num_rows / nearest) < 1e-6 * found
