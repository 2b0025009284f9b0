"""Several proposers as one."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.lookup_proposers import NgramProposer, PredictionProposer
from speculative.proposer import EMPTY, ChainProposer, Proposal, better_of


def proposal(tokens: Sequence[int], *confidences: float, name: str = "ngram") -> Proposal:
    return Proposal(tuple(tokens), confidences, name)


def taken_at_its_word(said: Proposal) -> tuple[float, ...]:
    return said.confidences


def best_of(cheap: Proposal, dear: Proposal) -> Proposal:
    return better_of(cheap, dear, taken_at_its_word)


CHEAP = proposal([1, 2, 3], 0.6, 0.6, 0.6)

proposals = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1)), max_size=5).map(
    lambda pairs: Proposal(tuple(token for token, _ in pairs), tuple(chance for _, chance in pairs), "any")
)


class TestBetterOf:
    @pytest.mark.parametrize(
        "dear", [EMPTY, proposal([7, 8, 9], 0.6, 0.6, 0.6), proposal([7, 8, 9], 0.5, 0.7, 0.7)]
    )
    def test_the_cheaper_one_wins_where_it_is_as_sure(self, dear: Proposal) -> None:
        assert best_of(CHEAP, dear) == CHEAP

    def test_the_surer_one_wins(self) -> None:
        dear = proposal([7, 8, 9], 0.8, 0.6, 0.6, name="draft")
        assert best_of(CHEAP, dear) == dear
        assert best_of(EMPTY, dear) == dear

    def test_a_long_guess_does_not_outweigh_a_short_certainty(self) -> None:
        dear = proposal([7], 0.9, name="draft")
        assert best_of(proposal([1] * 8, *[0.6] * 8), dear) == dear

    def test_two_that_agree_confirm_each_other(self) -> None:
        dear = proposal([1, 2], 0.6, 0.5, name="draft")
        assert best_of(CHEAP, dear) == CHEAP
        assert best_of(CHEAP, proposal([1, 2, 3, 4], *[0.7] * 4)).tokens == (1, 2, 3, 4)

    def test_what_only_the_cheap_one_says_must_be_nearly_as_likely(self) -> None:
        dear = proposal([1, 2], 0.9, 0.5, name="draft")
        assert best_of(CHEAP, dear) == dear

    @given(proposals, proposals)
    def test_what_comes_out_is_what_one_of_them_said(self, cheap: Proposal, dear: Proposal) -> None:
        best = best_of(cheap, dear)
        assert best.tokens in {cheap.tokens, dear.tokens}
        assert len(best.confidences) == len(best.tokens)
        assert bool(best.tokens) == bool(cheap.tokens or dear.tokens)


class Fixed:
    """Always proposes the same, and remembers what it was told."""

    def __init__(self, name: str, *pairs: tuple[int, float]) -> None:
        self.name = name
        self._pairs = pairs
        self.heard: list[object] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.heard.append(list(tokens))

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        self.heard.append((max_tokens, list(after)))
        pairs = self._pairs[: max(max_tokens, 0)]
        return Proposal(tuple(token for token, _ in pairs), tuple(chance for _, chance in pairs), self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        self.heard.append(on_ready)

    def close(self) -> None:
        self.heard.append("close")


def test_all_hear_everything() -> None:
    members = [Fixed("ngram", (1, 0.99)), Fixed("draft", (2, 0.2))]
    chain = ChainProposer(members, taken_at_its_word)
    chain.listen(print)
    chain.extend([1, 2])
    assert chain.propose(4, [3]).proposer == "ngram"
    chain.propose(0, [3, 4])
    chain.close()
    for member in members:
        assert member.heard == [print, [1, 2], (4, [3]), (0, [3, 4]), "close"]


def test_the_likeliest_signs() -> None:
    chain = ChainProposer(
        [Fixed("ngram", (1, 0.3)), Fixed("history", (4, 0.7)), Fixed("draft", (2, 0.6))], taken_at_its_word
    )
    assert chain.propose(4) == Proposal((4,), (0.7,), "history")


def test_a_prediction_carries_an_answer_that_nothing_else_foresees() -> None:
    answer = [50, 51, 52, 53, 54]
    chain = ChainProposer([PredictionProposer(answer), NgramProposer()], taken_at_its_word)
    chain.extend([1, 2, 3])
    assert chain.propose(3).tokens == (50, 51, 52)
    chain.extend(answer[:4])
    assert chain.propose(3).tokens == (54,)
