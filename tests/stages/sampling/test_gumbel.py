"""The noise: a function of (seed, position, id), exponential, and independent in all three."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.sampling.gumbel import BLOCK_SIZE, _word, _words, block_rings, position_key, ring_times

seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**31)
N_IDS = 1 << 18
BOUND = 4.5  # standard deviations; a fair coin lands beyond once in 150,000 draws, and the seeds are fixed


def times(seed: int, position: int, n_ids: int = N_IDS) -> np.ndarray:
    return ring_times(position_key(seed, position), np.arange(n_ids))


@given(seeds, positions, st.sets(st.integers(0, 300_000), min_size=1, max_size=40))
def test_an_id_s_noise_does_not_depend_on_the_other_candidates(
    seed: int, position: int, ids: set[int]
) -> None:
    key = position_key(seed, position)
    together = ring_times(key, np.array(sorted(ids)))
    alone = [ring_times(key, np.array([one]))[0] for one in sorted(ids)]
    assert together.tolist() == alone


@given(seeds, positions)
def test_a_block_s_first_ring_is_its_earliest(seed: int, position: int) -> None:
    key = position_key(seed, position)
    rings = block_rings(key, np.arange(8))
    table = ring_times(key, np.arange(8 * BLOCK_SIZE)).reshape(8, BLOCK_SIZE)
    assert np.array_equal(table.min(axis=1), rings.times)
    assert np.array_equal(table.argmin(axis=1) + np.arange(8) * BLOCK_SIZE, rings.first)
    assert rings.times.min() > 0.0


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 4095])
def test_the_clocks_are_exponential(seed: int, position: int) -> None:
    uniform = -np.expm1(-times(seed, position))
    counts, _ = np.histogram(uniform, bins=256, range=(0.0, 1.0))
    chi_square = float(((counts - N_IDS / 256) ** 2 / (N_IDS / 256)).sum())
    assert abs(chi_square - 255) < BOUND * math.sqrt(2 * 255)


@pytest.mark.parametrize("share", [0.5, 0.1, 1e-3])
def test_early_rings_are_as_frequent_as_they_should_be(share: float) -> None:
    early = sum(int((times(7, position) < -math.log1p(-share)).sum()) for position in range(8))
    total = 8 * N_IDS
    assert abs(early - share * total) < BOUND * math.sqrt(total * share * (1 - share))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (times(3, 10), times(3, 11)),  # neighbouring positions
        (times(3, 10), times(4, 10)),  # neighbouring seeds
        (times(3, 10), times(4, 9)),  # one up, one down
        (times(3, 10)[:-1], times(3, 10)[1:]),  # neighbouring ids
        (times(3, 10)[:-BLOCK_SIZE], times(3, 10)[BLOCK_SIZE:]),  # the same slot of neighbouring blocks
        (times(3, 10)[:-1], times(3, 11)[1:]),  # shifted: one counter must not stand in for another
        (times(3, 10)[1:], times(3, 11)[:-1]),
    ],
    ids=["positions", "seeds", "both", "ids", "blocks", "shift up", "shift down"],
)
def test_clocks_are_independent(left: np.ndarray, right: np.ndarray) -> None:
    # Ranks in 16 equal classes each way; under independence all 256 cells are equally full.
    classes = [np.minimum((-np.expm1(-side) * 16).astype(int), 15) for side in (left, right)]
    counts = np.bincount(classes[0] * 16 + classes[1], minlength=256)
    chi_square = float(((counts - left.size / 256) ** 2 / (left.size / 256)).sum())
    assert abs(chi_square - 255) < BOUND * math.sqrt(2 * 255)


def test_words_are_those_of_splitmix64() -> None:
    """The first outputs of the published generator for the seeds 0 and 1234567."""
    assert _word(0, 0) == 0xE220A8397B1DCDAF
    assert _word(1234567, 0) == 6457827717110365317
    counters = np.arange(1000)
    assert _words(99, counters).tolist() == [_word(99, counter) for counter in range(1000)]


def test_the_noise_behind_a_seed_stays() -> None:
    """The text behind a seed is a promise to users: a refactoring must not change it."""
    clocks = ring_times(position_key(42, 17), np.arange(3))
    assert clocks.tolist() == pytest.approx([1.0540614603193579, 0.051159199955489065, 0.2512938251779914])
