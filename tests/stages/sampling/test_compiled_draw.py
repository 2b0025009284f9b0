"""Draws in compiled code: the very ids that the arrays give, wherever they are decided at all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.sampling import sampler as sampler_module
from stages.sampling.gumbel import position_key
from stages.sampling.sampler import Sampler, SamplingParams, draw_by_arrays, draw_compiled
from tests.stages.sampling.test_sampling import rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

FILTERS = {
    "none": SamplingParams(1.0),
    "hot": SamplingParams(1.6),
    "cold": SamplingParams(0.2),
    "top-k": SamplingParams(1.0, top_k=40),
    "top-p": SamplingParams(1.0, top_p=0.95),
    "hot top-p": SamplingParams(1.6, top_p=0.9),
    "min-p": SamplingParams(1.0, min_p=0.05),
    "all": SamplingParams(0.8, top_k=40, top_p=0.95, min_p=0.05),
    "top-p and min-p": SamplingParams(1.2, top_p=0.8, min_p=0.01),
}
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-6, 1e-3, 0.1, 0.7, 1.0, 2.0, 50.0, 1e6]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 40, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.25, 0.5, 0.9, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.2, 1.0]),
)


def row_of_a_model(n_vocab: int, seed: int) -> NDArray[np.float32]:
    """A broad hump and a few likely tokens."""
    random = np.random.default_rng(seed)
    row = (3.0 * random.standard_normal(n_vocab)).astype(np.float32)
    row[random.integers(0, n_vocab, 30)] += (15.0 * random.random(30)).astype(np.float32)
    return row


def by_arrays(row: NDArray[np.float32], key: int, sampling: SamplingParams) -> int:
    return draw_by_arrays(row, float(row.max()), key, sampling)


def test_is_compiled_where_the_tests_run() -> None:
    assert sampler_module._function() is not None


@given(rows, samplings, st.integers(0, 2**64 - 1))
def test_what_it_draws_the_arrays_draw(row: NDArray[np.float32], sampling: SamplingParams, key: int) -> None:
    drawn = draw_compiled(row, key, sampling)
    assert drawn is None or drawn == by_arrays(row, key, sampling)


@pytest.mark.parametrize("case", FILTERS)
@pytest.mark.parametrize("n_vocab", [1000, 49152, 151936])
def test_rows_of_models_are_decided_and_alike(n_vocab: int, case: str) -> None:
    sampling = FILTERS[case]
    num_undecided = 0
    for position in range(40):
        row, key = row_of_a_model(n_vocab, position % 4), position_key(7, position)
        drawn = draw_compiled(row, key, sampling)
        num_undecided += drawn is None
        assert drawn in (None, by_arrays(row, key, sampling))
    assert num_undecided <= 1


@pytest.mark.sweep
@pytest.mark.parametrize("case", FILTERS)
def test_a_hundred_thousand_draws_are_alike(case: str) -> None:
    sampling = FILTERS[case]
    table = [row_of_a_model(2000, seed) for seed in range(50)]
    for position in range(100_000):
        row, key = table[position % len(table)], position_key(position // len(table), position)
        assert draw_compiled(row, key, sampling) in (None, by_arrays(row, key, sampling))


def test_equal_logits_are_drawn_by_the_lowest_id() -> None:
    """Whole rows of few values: rings and rankings that tie."""
    row = np.repeat(np.array([1.0, 0.0], np.float32), 500)
    for position in range(200):
        for sampling in (SamplingParams(1.0, top_k=3), SamplingParams(1.0, min_p=0.9)):
            key = position_key(3, position)
            drawn = draw_compiled(row, key, sampling)
            assert drawn == by_arrays(row, key, sampling)
            assert drawn is not None
            assert drawn < (3 if sampling.top_k else 500)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 31, 32, 99])
def test_numbers_that_are_none_are_left_to_the_sampler(value: float, place: int) -> None:
    row = np.zeros(100, np.float32)
    row[place] = value
    assert draw_compiled(row, 1, SamplingParams(1.0)) is None


def test_what_float32_cannot_tell_is_left_to_the_arrays() -> None:
    row = row_of_a_model(1000, 1)
    assert draw_compiled(row, 1, SamplingParams(1e-9)) is None
    assert draw_compiled(row[::2], 1, SamplingParams(1.0)) is None
    assert draw_compiled(np.full(8, -np.inf, np.float32), 1, SamplingParams(1.0)) is None
    # Half of the mass is exactly where the third of four equal tokens begins.
    assert draw_compiled(np.zeros(4, np.float32), 1, SamplingParams(1.0, top_k=4, top_p=0.5)) is None


def test_arrays_take_over_where_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of_a_model(1000, 2)
    sampler = Sampler(SamplingParams(1.0, top_p=0.9, seed=5))
    drawn = [sampler.sample(row, position) for position in range(20)]
    sampler_module._function.cache_clear()
    monkeypatch.setattr(sampler_module, "_EXTENSION", "stages._absent")
    try:
        assert [sampler.sample(row, position) for position in range(20)] == drawn
    finally:
        sampler_module._function.cache_clear()
