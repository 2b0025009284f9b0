"""The sampler: greedy, filters as defined, draws as probable as they should be, errors with a name."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from numpy.typing import NDArray

from spanmesh_proto.errors import InvalidRequest, StageFailed
from stages.sampling.gumbel import position_key, race_all, race_among
from stages.sampling.sampler import Sampler, SamplingParams, candidate_ids, nucleus_size, top_ids

Row = NDArray[np.float32]

# Few distinct values, so that ties are common.
rows = st_np.arrays(
    np.float32,
    st.integers(1, 320),
    elements=st.one_of(st.integers(-3, 3).map(float), st.floats(-30, 30, width=32), st.just(-math.inf)),
).filter(lambda row: bool(np.isfinite(row).any()))
temperatures = st.sampled_from([1e-6, 0.1, 0.7, 1.0, 2.0, 50.0])


def scale(row: Row, temperature: float) -> NDArray[np.float64]:
    return (row.astype(np.float64) - float(row.max())) / temperature


def probabilities(row: Row, temperature: float = 1.0) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(scale(row, temperature))
    share: NDArray[np.float64] = weights / weights.sum()
    return share


def candidates(row: Row, sampling: SamplingParams) -> list[int]:
    return [int(token) for token in candidate_ids(row, scale(row, sampling.temperature), sampling)]


def candidates_by_definition(row: Row, sampling: SamplingParams) -> list[int]:
    """The filters one after the other, in plain Python."""
    ranked = sorted(range(row.size), key=lambda token: (-row[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    weight = dict(enumerate(np.exp(scale(row, sampling.temperature)).tolist()))
    if sampling.top_p < 1:
        total, reached, kept = math.fsum(weight[token] for token in ranked), 0.0, []
        for token in ranked:
            kept.append(token)
            reached += weight[token]
            if reached >= sampling.top_p * total:
                break
        ranked = kept
    return sorted(token for token in ranked if weight[token] >= sampling.min_p * weight[ranked[0]])


class TestGreedy:
    @given(rows)
    def test_takes_the_largest_logit_and_the_lowest_id_on_ties(self, row: Row) -> None:
        assert Sampler(SamplingParams()).sample(row, 5) == row.tolist().index(row.max())

    def test_filters_and_seed_change_nothing(self) -> None:
        row = np.array([1, 3, 2, 3], dtype=np.float32)
        assert Sampler(SamplingParams(top_k=2, top_p=0.1, min_p=0.5, seed=9)).sample(row, 0) == 1


class TestFilters:
    row = np.log(np.array([0.1, 0.4, 0.05, 0.2, 0.25], dtype=np.float32))

    @pytest.mark.parametrize(
        ("sampling", "kept"),
        [
            (SamplingParams(1.0), [0, 1, 2, 3, 4]),
            (SamplingParams(1.0, top_k=2), [1, 4]),
            (SamplingParams(1.0, top_k=99), [0, 1, 2, 3, 4]),
            (SamplingParams(1.0, top_p=0.64), [1, 4]),  # 0.4 + 0.25 = 0.65 reaches it
            (SamplingParams(1.0, top_p=0.66), [1, 3, 4]),
            (SamplingParams(1.0, top_p=1e-6), [1]),
            (SamplingParams(1.0, min_p=0.45), [1, 3, 4]),  # at least 0.45 * 0.4 = 0.18
            (SamplingParams(1.0, min_p=0.55), [1, 4]),
            (SamplingParams(1.0, min_p=1.0), [1]),
            # Of the best three, 0.85 in all, 0.4 + 0.25 is 0.76: top-p scales what top-k left up to 1.
            (SamplingParams(1.0, top_k=3, top_p=0.75), [1, 4]),
            (SamplingParams(1.0, top_p=0.75), [1, 3, 4]),
            # At temperature 2 probabilities go by their square roots: 0.4 has 0.30 of the mass, not 0.4.
            (SamplingParams(2.0, top_p=0.35), [1, 4]),
            (SamplingParams(1.0, top_p=0.35), [1]),
            (SamplingParams(0.5, min_p=0.3), [1, 4]),  # squares: 0.16, 0.0625, 0.04
        ],
    )
    def test_cases_worked_by_hand(self, sampling: SamplingParams, kept: list[int]) -> None:
        assert candidates(self.row, sampling) == kept

    @given(
        rows,
        st.builds(
            SamplingParams,
            temperature=temperatures,
            top_k=st.integers(0, 400),
            top_p=st.sampled_from([1e-3, 0.21, 0.5, 0.77, 0.9, 0.95, 1.0]),
            min_p=st.sampled_from([0.0, 1e-4, 0.07, 0.33, 0.9]),
        ),
    )
    def test_candidates_are_those_of_the_definition(self, row: Row, sampling: SamplingParams) -> None:
        # Sums in another order may differ in the last bit: only then may a token on the edge come or go.
        got, want = candidates(row, sampling), candidates_by_definition(row, sampling)
        if got != want:
            nudged = [
                candidates_by_definition(
                    row, SamplingParams(sampling.temperature, sampling.top_k, top_p, min_p)
                )
                for top_p in (sampling.top_p * (1 - 1e-12), min(1.0, sampling.top_p * (1 + 1e-12)))
                for min_p in (sampling.min_p * (1 - 1e-12), min(1.0, sampling.min_p * (1 + 1e-12)))
            ]
            assert got in nudged

    @given(rows, st.integers(1, 320))
    def test_top_ids_rank_by_logit_then_id(self, row: Row, count: int) -> None:
        count = min(count, row.size)
        ranked = sorted(range(row.size), key=lambda token: (-row[token], token))
        assert top_ids(row, count).tolist() == sorted(ranked[:count])

    def test_a_nucleus_wider_than_the_first_tries(self) -> None:
        scaled = np.zeros(49152)
        assert nucleus_size(scaled, 49152, 0.9) == math.ceil(0.9 * 49152)
        assert nucleus_size(scaled, 10, 0.9) == 9


class TestDraw:
    @given(rows, temperatures, st.integers(0, 2**64 - 1), st.integers(0, 2**31))
    def test_skipping_noise_never_changes_the_winner(
        self, row: Row, temperature: float, seed: int, position: int
    ) -> None:
        key = position_key(seed, position)
        everyone = race_among(key, np.arange(row.size), scale(row, temperature))
        assert race_all(key, row, float(row.max()), temperature) == everyone

    @pytest.mark.parametrize("n_vocab", [49152, 262144])
    @pytest.mark.parametrize("spread", [0.0, 1.0, 3.0, 30.0])
    def test_nor_at_the_size_of_real_vocabularies(self, n_vocab: int, spread: float) -> None:
        row = (spread * np.random.default_rng(5).standard_normal(n_vocab)).astype(np.float32)
        for position in range(20):
            key = position_key(11, position)
            everyone = race_among(key, np.arange(n_vocab), scale(row, 1.0))
            assert race_all(key, row, float(row.max()), 1.0) == everyone

    @given(rows, temperatures, st.integers(0, 2**64 - 1))
    def test_a_filter_that_keeps_the_winner_keeps_the_draw(
        self, row: Row, temperature: float, seed: int
    ) -> None:
        """The noise of a token does not depend on which others are left."""
        free = Sampler(SamplingParams(temperature, seed=seed)).sample(row, 3)
        rank = sorted(range(row.size), key=lambda token: (-row[token], token)).index(free)
        assert Sampler(SamplingParams(temperature, top_k=rank + 1, seed=seed)).sample(row, 3) == free

    @given(
        rows,
        st.builds(SamplingParams, temperature=temperatures, top_k=st.integers(0, 9), seed=st.integers(0, 99)),
    )
    def test_a_row_drawn_again_gives_the_same_token(self, row: Row, sampling: SamplingParams) -> None:
        sampler = Sampler(sampling)
        first = sampler.sample(row, 8)
        assert [sampler.sample(row, position) for position in (7, 8, 9)][1] == first
        assert Sampler(sampling).sample(row, 8) == first

    @given(rows, temperatures, st.integers(0, 99))
    def test_minus_infinity_is_never_drawn(self, row: Row, temperature: float, seed: int) -> None:
        assert math.isfinite(row[Sampler(SamplingParams(temperature, seed=seed)).sample(row, 0)])

    def test_a_temperature_near_zero_is_greedy(self) -> None:
        row = np.array([0.5, 2.0, 1.999], dtype=np.float32)
        assert {Sampler(SamplingParams(1e-38, seed=seed)).sample(row, 0) for seed in range(50)} == {1}


LEFT: dict[str, tuple[SamplingParams, Callable[[NDArray[np.float64]], NDArray[np.bool_]]]] = {
    "no filter": (SamplingParams(1.0), lambda p: p > 0),
    "hot": (SamplingParams(1.5), lambda p: p > 0),
    "top-k": (SamplingParams(1.0, top_k=5), lambda p: p >= np.sort(p)[-5]),
    "top-p": (
        SamplingParams(0.8, top_p=0.7),
        lambda p: p >= np.sort(p)[::-1][(np.cumsum(np.sort(p)[::-1]) < 0.7).sum()],
    ),
    "min-p": (SamplingParams(1.0, min_p=0.2), lambda p: p >= 0.2 * p.max()),
}


@pytest.mark.parametrize(
    ("case", "over"),
    [
        *((case, "positions") for case in LEFT),
        # Where the noise comes from is one thing, and which tokens it is given to another.
        ("no filter", "seeds"),
        ("top-p", "seeds"),
        *(pytest.param(case, "seeds", marks=pytest.mark.sweep) for case in ("hot", "top-k", "min-p")),
    ],
)
def test_tokens_come_as_often_as_their_probabilities_say(case: str, over: str) -> None:
    sampling, kept = LEFT[case]
    # 600 ids are three blocks, the last one short; 12 of them share most of the probability.
    row = np.full(600, -9.0, dtype=np.float32)
    favourites = np.arange(12) * 50 + 3
    row[favourites] = np.random.default_rng(1).standard_normal(12)
    wanted = probabilities(row, sampling.temperature)
    wanted = np.where(kept(wanted), wanted, 0.0)
    wanted /= wanted.sum()

    n_draws = 12000
    drawn = np.zeros(row.size)
    for draw in range(n_draws):
        position, seed = (draw, 77) if over == "positions" else (77, draw)
        settings = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed)
        drawn[Sampler(settings).sample(row, position)] += 1

    assert drawn[wanted == 0].sum() == 0
    cells = [*favourites[wanted[favourites] > 0].tolist()]
    rest_drawn, rest_wanted = n_draws - drawn[cells].sum(), 1.0 - wanted[cells].sum()
    chi_square = float(((drawn[cells] - n_draws * wanted[cells]) ** 2 / (n_draws * wanted[cells])).sum())
    freedom = len(cells) - 1
    if rest_wanted > 1e-9:
        chi_square += (rest_drawn - n_draws * rest_wanted) ** 2 / (n_draws * rest_wanted)
        freedom += 1
    assert freedom >= 2
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom)


class TestBadInput:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
            ("top_k", -1),
            ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan),
            ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan),
            ("seed", -1), ("seed", 2**64),
        ],
    )  # fmt: skip
    def test_a_value_out_of_range_is_refused_by_name(self, field: str, value: float) -> None:
        with pytest.raises(InvalidRequest, match=rf"^{field} is .*: it must be ") as caught:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        assert caught.value.param == field

    def test_the_bounds_themselves_are_allowed(self) -> None:
        SamplingParams(0.0, 0, 1.0, 0.0, 0)
        SamplingParams(100.0, 10**9, 1e-9, 1.0, 2**64 - 1)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        "row",
        [[1.0, math.nan, 2.0], [math.inf, 0.0], [-math.inf, -math.inf]],
        ids=["nan", "inf", "all ruled out"],
    )
    def test_logits_that_are_not_numbers_fail_the_stage(self, temperature: float, row: list[float]) -> None:
        with pytest.raises(StageFailed, match=r"position 12 peak at (nan|inf|-inf)"):
            Sampler(SamplingParams(temperature)).sample(np.array(row, dtype=np.float32), 12)
