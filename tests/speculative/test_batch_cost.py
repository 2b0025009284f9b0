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
