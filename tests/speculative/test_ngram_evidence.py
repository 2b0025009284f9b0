"""Chances by evidence, and how a session corrects them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.ngram_search import MATCHED, MAX_ORDER, PER_TOKEN, EvidenceTable


def test_every_match_has_its_evidence() -> None:
    assert len(MATCHED) == MAX_ORDER + 1
    assert list(MATCHED) == sorted(MATCHED)


def test_the_more_evidence_the_better_the_chance() -> None:
    table = EvidenceTable()
    chances = [table.chances(evidence, 1)[0] for evidence in range(1, 200)]
    assert all(one <= other for one, other in pairwise(chances))
    assert 0.05 < chances[0] < 0.3
    assert 0.99 < chances[-1] < 1.0


@given(st.integers(1, 300), st.integers(0, 100))
def test_each_foretold_token_is_evidence_for_the_next(evidence: int, count: int) -> None:
    table = EvidenceTable()
    assert table.chances(evidence, count) == tuple(
        table.chances(evidence + PER_TOKEN * place, 1)[0] for place in range(count)
    )


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 200), st.booleans()), max_size=20))
def test_a_long_run_is_learned_as_its_tokens_one_by_one(runs: list[tuple[int, int, bool]]) -> None:
    at_once, one_by_one = EvidenceTable(), EvidenceTable()
    for evidence, num_right, is_missed in runs:
        at_once.learn(evidence, num_right, is_missed=is_missed)
        for place in range(num_right):
            one_by_one.learn(evidence + PER_TOKEN * place, 1, is_missed=False)
        if is_missed:
            one_by_one.learn(evidence + PER_TOKEN * num_right, 0, is_missed=True)
    for evidence in range(1, 200):
        assert at_once.chances(evidence, 1) == pytest.approx(one_by_one.chances(evidence, 1))


@pytest.mark.parametrize("truth", [0.0, 0.3, 1.0])
def test_chances_become_what_is_seen(truth: float) -> None:
    table = EvidenceTable()
    for draw in range(200):
        is_right = draw % 10 < truth * 10
        table.learn(4, int(is_right), is_missed=not is_right)
    (chance,) = table.chances(4, 1)
    assert chance == pytest.approx(truth, abs=0.05)
    assert 0.0 <= chance <= 1.0
