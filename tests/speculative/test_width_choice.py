"""The widths with the most expected tokens per second, against the formulas and common sense."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.cost_model import DraftCost, Timing, best_rate, mean_recomputed, row_price
from tests.speculative.test_ring_timing import outcome

LINEAR = {1: 4.0, 2: 8.0, 4: 16.0, 8: 32.0, 17: 68.0}
FLAT = {1: 4.0, 2: 4.1, 4: 4.2, 8: 4.5, 17: 5.0}


def ring(stairs: dict[int, float], num_stages: int = 3) -> Timing:
    """20 ms of network."""
    timing = Timing()
    for rows, elapsed_ms in stairs.items():
        timing.add(outcome(rows, *[elapsed_ms] * num_stages), is_alone=True)
    return timing


def test_where_rows_are_dear_windows_are_narrow_and_many() -> None:
    rate = best_rate(ring(LINEAR), 0.8, max_width=16, max_depth=64)
    assert (rate.front, rate.width) == (0, 1)
    # 32 ms around the ring, a window every 4 ms, and three for each that fills it.
    assert rate.depth == 24
    # [1/(1−a)] / [T + τ·a/(1−a)]
    assert rate.tokens_per_s == pytest.approx(1000 * 5 / (32 + 4 * 4), rel=0.01)


def test_where_rows_are_free_windows_are_wide() -> None:
    rate = best_rate(ring(FLAT), 0.9, max_width=16, max_depth=24)
    assert rate.width >= 8
    assert rate.front >= 8


def test_in_step_it_is_the_formula_of_windows_in_step() -> None:
    rate = best_rate(ring(FLAT), 0.9, max_width=8, max_depth=1)
    assert rate.front == 8
    # E / (S·t(k+1) + network), t(9) between t(8) and t(17)
    expected = (1 - 0.9**9) / 0.1 / (20 + 3 * (4.5 + 0.5 / 9))
    assert rate.tokens_per_s == pytest.approx(1000 * expected, rel=0.01)


def test_in_step_nothing_likely_means_nothing_proposed() -> None:
    assert best_rate(ring(LINEAR), 0.1, max_width=8, max_depth=1).front == 0


def test_drafting_sets_the_beat_where_it_is_slow() -> None:
    timing = ring(FLAT)
    quick = best_rate(timing, 0.9, max_width=16, max_depth=24)
    slow = best_rate(timing, 0.9, max_width=16, max_depth=24, token_ms=20.0)
    assert slow.tokens_per_s < quick.tokens_per_s
    assert slow.width == 1


def test_drafting_at_the_last_stage_takes_its_time_for_windows() -> None:
    beside, at_tail = ring(LINEAR), ring(LINEAR)
    at_tail.note_draft_cost(DraftCost(2.0, row_ms=2.0, is_at_tail=True))
    found = best_rate(beside, 0.8, max_width=16, max_depth=64, token_ms=2.0)
    assert found == best_rate(beside, 0.8, max_width=16, max_depth=64)
    # A row of a window takes 4 ms there, and each of its tokens 2 ms before.
    rate = best_rate(at_tail, 0.8, max_width=16, max_depth=64, token_ms=2.0)
    assert (rate.front, rate.width) == (0, 1)
    assert rate.tokens_per_s == pytest.approx(1000 * 5 / (32 + 6 * 4), rel=0.01)
    # What others propose was not drafted there.
    assert best_rate(at_tail, 0.8, max_width=16, max_depth=64) == found
    # In step a window waits until its tokens are drafted.
    at_tail = ring(FLAT)
    at_tail.note_draft_cost(DraftCost(3.0, row_ms=3.0, is_at_tail=True))
    rate = best_rate(at_tail, 0.9, max_width=1, max_depth=1, token_ms=3.0)
    assert rate.tokens_per_s == pytest.approx(1000 * 1.9 / (20 + 3 * 4.1 + 3.0), rel=0.01)
    assert best_rate(at_tail, 0.9, max_width=8, max_depth=1, token_ms=100.0).front == 0


def test_without_a_measure_it_is_moderate() -> None:
    rate = best_rate(Timing(), 0.9, max_width=16, max_depth=24)
    assert rate.width == 4


def test_no_width_is_no_pace() -> None:
    with pytest.raises(ValueError, match="max_width is 0"):
        best_rate(ring(FLAT), 0.9, max_width=0, max_depth=1)


@given(
    st.dictionaries(st.integers(1, 33), st.floats(0.01, 500.0), min_size=1),
    st.floats(0.0, 1.0),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_it_keeps_within_its_limits(
    stairs: dict[int, float], acceptance: float, max_width: int, max_depth: int
) -> None:
    rate = best_rate(ring(stairs), acceptance, max_width=max_width, max_depth=max_depth)
    assert 0 <= rate.front <= max_width
    assert 1 <= rate.width <= max_width
    assert 1 <= rate.depth <= max_depth
    assert 0.0 < rate.tokens_per_s < 1e6


class TestRowPrice:
    def test_a_slow_wire_makes_rows_cheap(self) -> None:
        timing = ring(LINEAR)
        near = row_price(timing, 1 / 12, num_rows=1, is_new_window=True)
        far = row_price(timing, 1 / 92, num_rows=1, is_new_window=True)
        assert near == pytest.approx(0.6 * 4 / 12)
        assert far == pytest.approx(0.6 * 4 / 92)

    def test_a_flat_stair_makes_further_rows_cheap(self) -> None:
        assert row_price(ring(FLAT), 1 / 32, num_rows=2, is_new_window=False) == 0.02

    def test_no_row_is_free_or_hopeless(self) -> None:
        timing = ring(LINEAR)
        assert row_price(timing, 1e-9, num_rows=1, is_new_window=True) == 0.02
        assert row_price(timing, 1e9, num_rows=1, is_new_window=True) == 0.95


@given(st.integers(0, 12), st.integers(1, 12), st.floats(0.0, 0.99), st.integers(0, 2**32 - 1))
def test_the_rows_that_are_computed_again_are_those_of_drawn_runs(
    front: int, width: int, acceptance: float, seed: int
) -> None:
    """Of drawn runs: accepted tokens of the last window come again, and in front a committed one."""
    lengths = np.minimum(np.random.default_rng(seed).geometric(1.0 - acceptance, 20_000) - 1, 1000)
    again = np.where(lengths < front, lengths + 1, (lengths - front) % width)
    assert mean_recomputed(front, width, acceptance) == pytest.approx(again.mean(), abs=0.15)


def test_where_a_rejection_goes_back_windows_are_narrower() -> None:
    stairs = {1: 4.0, 2: 6.0, 4: 9.0, 8: 14.0, 17: 24.0}
    trimmed = best_rate(ring(stairs), 0.8, max_width=16, max_depth=24)
    recurrent = best_rate(ring(stairs), 0.8, max_width=16, max_depth=24, is_recurrent=True)
    assert recurrent.width <= trimmed.width
    assert recurrent.front <= trimmed.front
    assert recurrent.tokens_per_s < trimmed.tokens_per_s
