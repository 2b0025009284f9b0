"""A prediction is followed from its first token on, left where it errs, and found again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.lookup_proposers import PredictionProposer

PREDICTION = list(range(100, 200))
PROMPT = [1, 2, 3]


def proposer_after(answer: list[int]) -> PredictionProposer:
    proposer = PredictionProposer(PREDICTION)
    proposer.extend(PROMPT)
    for token in answer:
        proposer.extend([token])
    return proposer


def test_begins_with_the_prediction_s_beginning() -> None:
    proposal = proposer_after([]).propose(99)
    assert list(proposal.tokens) == PREDICTION[: len(proposal.tokens)]
    assert 8 <= len(proposal.tokens) < 99
    assert proposal.proposer == "prediction"


def test_all_of_it_once_it_proved_right() -> None:
    assert list(proposer_after(PREDICTION[:20]).propose(99).tokens) == PREDICTION[20:]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([*PREDICTION[:20], 9, PREDICTION[21]], PREDICTION[22:24]),
        ([*PREDICTION[:20], 9, 9, PREDICTION[20]], PREDICTION[21:23]),
        ([*PREDICTION[:20], PREDICTION[23]], PREDICTION[24:26]),
        ([9, PREDICTION[0]], PREDICTION[1:3]),
    ],
)
def test_comes_back_after_an_edit(answer: list[int], expected: list[int]) -> None:
    assert list(proposer_after(answer).propose(2).tokens) == expected


def test_is_silent_behind_its_end_and_while_it_knows_no_better() -> None:
    assert proposer_after(PREDICTION).propose(8).tokens == ()
    assert proposer_after([9, 9, 9]).propose(8).tokens == ()


def test_what_is_in_flight_counts_as_said() -> None:
    proposer = proposer_after(PREDICTION[:10])
    assert list(proposer.propose(4, after=PREDICTION[10:30]).tokens) == PREDICTION[30:34]
    assert proposer.propose(4, after=[9]).tokens == ()
    assert list(proposer.propose(4).tokens) == PREDICTION[10:14]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.lists(st.integers(0, 6), max_size=30))
def test_proposes_the_prediction_s_tokens_only(prediction: list[int], answer: list[int]) -> None:
    proposer = PredictionProposer(prediction)
    proposer.extend(PROMPT)
    for token in answer:
        proposer.extend([token])
        proposed = list(proposer.propose(6).tokens)
        starts = range(len(prediction) - len(proposed) + 1)
        assert any(prediction[start : start + len(proposed)] == proposed for start in starts)


def test_the_rest_of_a_very_long_prediction_takes_no_memory() -> None:
    proposer = PredictionProposer(list(range(100_000)))
    proposer.extend(PROMPT)
    while proposer.read_on():
        pass
    assert proposer._cursor._index.stop == 32_768
    assert list(proposer.propose(4).tokens) == [0, 1, 2, 3]
