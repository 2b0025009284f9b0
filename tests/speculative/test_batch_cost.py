"""Batch times, learned row count by row count."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.cost_model import BatchTimeModel

samples = st.lists(st.tuples(st.integers(1, 64), st.floats(0.01, 1000.0)), min_size=1, max_size=40)


def measured(*stairs: tuple[int, float]) -> BatchTimeModel:
    table = BatchTimeModel()
    for num_rows, elapsed_ms in stairs:
        table.add(num_rows, elapsed_ms)
    return table


def test_nothing_is_known_before_the_first_batch() -> None:
    assert BatchTimeModel().ms(1) is None


def test_known_rows_are_as_measured_and_between_them_it_interpolates() -> None:
    table = measured((1, 4.0), (4, 13.0), (8, 15.0))
    assert [table.ms(rows) for rows in (1, 2, 4, 6, 8)] == [4.0, 7.0, 13.0, 14.0, 15.0]


def test_beyond_what_is_known_it_hopes_a_little() -> None:
    table = measured((1, 4.0), (4, 13.0), (8, 15.0))
    assert table.ms(10) == pytest.approx(15.8)


def test_a_steep_last_step_does_not_bar_wider_windows() -> None:
    table = measured((1, 4.0), (2, 5.0), (3, 12.0))
    assert table.ms(5) == pytest.approx(12.0 + 0.8 * 2 * (12.0 - 4.0) / 2)


def test_one_row_count_gives_a_moderate_slope() -> None:
    table = measured((1, 4.0))
    assert table.ms(1) == 4.0
    assert 4.0 < (table.ms(2) or 0.0) < 8.0


def test_more_rows_never_take_less() -> None:
    table = measured((1, 4.0), (2, 9.0), (3, 6.0))
    assert table.ms(3) == 9.0
    assert table.ms(5) == 9.0


def test_a_hiccup_moves_little_and_a_change_is_learned() -> None:
    table = measured(*[(1, 4.0)] * 20, (1, 400.0))
    assert table.ms(1) == pytest.approx(4.5)
    for _ in range(60):
        table.add(1, 12.0)
    assert table.ms(1) == pytest.approx(12.0, rel=0.02)


@given(samples)
def test_it_is_finite_positive_and_rising_everywhere(stairs: list[tuple[int, float]]) -> None:
    table = measured(*stairs)
    times = [table.ms(rows) or 0.0 for rows in range(1, 130)]
    assert all(0.0 < time < 1e6 for time in times)
    assert all(more >= fewer * (1 - 1e-9) for fewer, more in itertools.pairwise(times))


def true_ms(num_rows: int, position: float) -> float:
    """Of a processor: weights, rows, and a cache that is read once and computed with for each row."""
    return 8.0 + 0.8 * num_rows + 0.001 * position * (2.6 + 1.2 * num_rows)


def test_what_a_row_takes_at_a_long_context_is_known_from_single_rows_there() -> None:
    table = BatchTimeModel()
    for _ in range(20):
        for num_rows in (1, 2, 4, 8):
            table.add(num_rows, true_ms(num_rows, 200), 200)
    for position in range(16_000, 16_020):
        table.add(1, true_ms(1, position), position)
    for num_rows in (1, 4, 8):
        assert table.ms(num_rows, 200) == pytest.approx(true_ms(num_rows, 200), rel=0.1)
        assert table.ms(num_rows, 16_000) == pytest.approx(true_ms(num_rows, 16_000), rel=0.2)
        assert table.ms(num_rows, 4_000) == pytest.approx(true_ms(num_rows, 4_000), rel=0.2)
    # Steps in rows, at one position, are no slope.
    flat = measured(*[(num_rows, 4.0 * num_rows) for num_rows in (1, 2, 4, 8)] * 20)
    assert flat.ms(4, 50_000) == flat.ms(4)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.01, 1e3), st.integers(0, 10**6)), max_size=40))
def test_at_any_position_it_is_finite_positive_and_rising(batches: list[tuple[int, float, int]]) -> None:
    table = measured((1, 1.0))
    for batch in batches:
        table.add(*batch)
    for position in (0, 1000, 10**6):
        times = [table.ms(rows, position) or 0.0 for rows in (1, 2, 8, 64, 100)]
        assert all(0.0 < time < 1e9 for time in times)
        assert all(more >= fewer * (1 - 1e-9) for fewer, more in itertools.pairwise(times))
