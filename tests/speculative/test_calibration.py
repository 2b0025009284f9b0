"""Confidences, measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.acceptance import NUM_BUCKETS, AcceptanceTable, Calibration, bucket_of
from speculative.proposer import Proposal, is_drafter


def fresh() -> Calibration:
    return Calibration(AcceptanceTable(200.0))


def of(confidence: float, width: int = 1, proposer: str = "draft") -> Proposal:
    return Proposal((7,) * width, (confidence,) * width, proposer)


def test_at_first_a_proposer_is_taken_at_its_word() -> None:
    assert fresh().acceptances(of(0.8, 3)) == pytest.approx((0.8, 0.8, 0.8))


def test_a_liar_is_found_out() -> None:
    calibration = fresh()
    for _ in range(20):
        calibration.judged(of(0.9, 4), 0)
    assert calibration.acceptance("draft", 0.9) < 0.1


def test_tokens_behind_a_wrong_one_say_nothing() -> None:
    calibration = fresh()
    for _ in range(50):
        calibration.judged(of(0.9, 8), 1)  # one right, one wrong, six unknown
    assert calibration.acceptance("draft", 0.9) == pytest.approx(0.5, abs=0.1)


def test_each_confidence_and_each_proposer_stand_alone() -> None:
    calibration = fresh()
    for _ in range(50):
        calibration.judged(of(0.9), 0)
    assert calibration.acceptance("draft", 0.3) == pytest.approx(0.3)
    assert calibration.acceptance("ngram", 0.9) == pytest.approx(0.9)


def test_far_ends_of_long_blocks_stand_alone() -> None:
    calibration = fresh()
    for _ in range(50):
        calibration.judged(Proposal((7,), (0.9,), "dflash", (12,)), 0)
    assert calibration.acceptance("dflash", 0.9, 12) < 0.1
    assert calibration.acceptance("dflash", 0.9, 15) < 0.1
    assert calibration.acceptance("dflash", 0.9, 8) == pytest.approx(0.9)


def test_sessions_learn_from_each_other_and_believe_themselves_more() -> None:
    shared = AcceptanceTable(200.0)
    first, second = Calibration(shared), Calibration(shared)
    for _ in range(60):
        first.judged(of(0.9), 0)
    assert second.acceptance("draft", 0.9) < 0.2
    for _ in range(20):
        second.judged(of(0.9), 1)
    assert second.acceptance("draft", 0.9) > 0.7
    assert first.acceptance("draft", 0.9) < second.acceptance("draft", 0.9)


def test_old_judgements_fade() -> None:
    calibration = fresh()
    for _ in range(500):
        calibration.judged(of(0.9), 1)
    for _ in range(40):
        calibration.judged(of(0.9), 0)
    assert calibration.acceptance("draft", 0.9) < 0.3


@given(st.lists(st.tuples(st.floats(-1.0, 2.0), st.integers(0, 4)), max_size=60), st.floats(-1.0, 2.0))
def test_it_is_always_a_probability(judged: list[tuple[float, int]], asked: float) -> None:
    calibration = fresh()
    for confidence, num_accepted in judged:
        calibration.judged(of(confidence, 4), num_accepted)
    assert 0.0 <= calibration.acceptance("draft", asked) <= 1.0


@given(st.floats(0.0, 1.0))
def test_every_confidence_has_a_bucket(confidence: float) -> None:
    assert 0 <= bucket_of(confidence) < NUM_BUCKETS


def test_the_best_of_some_proposers_is_that_of_this_session() -> None:
    shared = AcceptanceTable(100)
    own, other = Calibration(shared), Calibration(shared)
    for calibration, name, num_right in ((own, "eagle3/1", 1), (own, "ngram", 9), (other, "eagle3", 10)):
        for index in range(10):
            calibration.judged(Proposal((5,), (0.5,), name), int(index < num_right))
    assert own.best_mean(is_drafter) == pytest.approx(0.1, abs=0.05)
    assert other.best_mean(is_drafter) > 0.9
    assert Calibration(shared).best_mean(is_drafter) == 0.0


def test_numbers_behind_a_kind_name_drafters() -> None:
    assert [is_drafter(name) for name in ("draft", "eagle3", "eagle3/0", "eagle3/12")] == [True] * 4
    assert [is_drafter(name) for name in ("ngram", "ngram/1", "", "/1", "oracle")] == [False] * 5
