"""The suffix automaton against brute force, and the proposer on top of it."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.ngram import NgramOptions, NgramProposer
from speculative.suffix_automaton import SuffixAutomaton

# Few letters: nearly everything repeats.
texts = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), max_size=40))


def index_of(text: Sequence[int]) -> SuffixAutomaton:
    index = SuffixAutomaton()
    for token in text:
        index.append(token)
    return index


def longest_repeat(text: Sequence[int], after: Sequence[int] = ()) -> tuple[int, int]:
    """Length of the longest suffix of `text + after` that ends in `text` before, and where it ends last."""
    whole = [*text, *after]
    for length in range(len(whole) - 1, 0, -1):
        for end in [*range(len(text) - 1, length - 1, -1), *([len(text)] if after else [])]:
            if end >= length and whole[end - length : end] == whole[-length:]:
                return length, end
    return 0, 0


class TestSuffixAutomaton:
    @given(texts)
    def test_knows_the_longest_repeated_suffix_and_where_it_was_last(self, text: list[int]) -> None:
        index = SuffixAutomaton()
        for count, token in enumerate(text, 1):
            index.append(token)
            length, end = longest_repeat(text[:count])
            assert index.repeated.length == length
            if length:
                assert index.end(index.repeated) == end

    @given(texts, st.lists(st.integers(0, 3), min_size=1, max_size=6))
    def test_reads_on_behind_the_text(self, text: list[int], after: list[int]) -> None:
        index = index_of(text)
        match = index.repeated
        for token in after:
            match = index.advance(match, token)
        length, end = longest_repeat(text, after)
        assert match.length == length
        if length:
            assert index.end(match) == end

    @pytest.mark.parametrize("period", [1, 2, 7])
    def test_a_loop_stays_cheap_and_its_ends_stay_occurrences(self, period: int) -> None:
        """In a loop every state is one link up from the next: more of them than are told of each new end."""
        text = [place % period for place in range(2000)]
        index = index_of(text)
        length, end = index.repeated.length, index.end(index.repeated)
        assert length == len(text) - period
        assert text[end - length : end] == text[-length:]
        match = index.repeated
        for token in [99, *text[:5]]:
            match = index.advance(match, token)
        assert match.length == 5
        assert text[index.end(match) - 5 : index.end(match)] == text[:5]


class TestNgramProposer:
    def proposed(self, text: Sequence[int], max_tokens: int = 8, **options: float) -> list[int]:
        return list(self.proposer(text, **options).propose(max_tokens).tokens)

    def proposer(self, text: Sequence[int], **options: float) -> NgramProposer:
        proposer = NgramProposer(NgramOptions(**options))  # type: ignore[arg-type]
        proposer.extend(text)
        return proposer

    def test_continues_as_it_did_the_last_time(self) -> None:
        text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 8, 1, 2, 3]
        assert self.proposed(text) == [5, 6, 7]

    def test_a_longer_match_outweighs_a_later_one(self) -> None:
        text = [0, 1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 0, 1, 2, 3]
        assert self.proposed(text, max_tokens=2) == [4, 9]

    @pytest.mark.parametrize(("matched", "width"), [(1, 0), (2, 2), (3, 3), (5, 5), (9, 8)])
    def test_proposes_more_the_longer_the_match(self, matched: int, width: int) -> None:
        text = [*range(30), 99, *range(matched)]
        assert self.proposed(text) == list(range(matched, matched + width))

    def test_options_set_the_scale(self) -> None:
        text = [*range(30), 99, 0, 1, 2]
        assert self.proposed(text, tokens_per_match=2.0, max_tokens=99) == [3, 4, 5, 6, 7, 8]
        assert self.proposed(text, min_match=4, max_tokens=99) == []

    @pytest.mark.parametrize("text", [[], [1], [1, 2, 3], [1, 2, 3, 1]])
    def test_says_nothing_without_a_match(self, text: list[int]) -> None:
        assert self.proposed(text) == []

    @pytest.mark.parametrize("max_tokens", [0, -1])
    def test_says_nothing_when_asked_for_nothing(self, max_tokens: int) -> None:
        assert self.proposed([1, 2, 1, 2], max_tokens=max_tokens) == []

    def test_a_loop_goes_on_beyond_what_is_known(self) -> None:
        assert self.proposed([1, 2, 3] * 3, max_tokens=6) == [1, 2, 3, 1, 2, 3]

    @given(texts, st.integers(0, 12))
    def test_tokens_in_flight_chain(self, text: list[int], count: int) -> None:
        """What is proposed after a window in flight is what would be proposed had it been longer."""
        proposer = self.proposer(text, tokens_per_match=99.0)
        flying = proposer.propose(count).tokens
        assert proposer.propose(20).tokens[: len(flying)] == flying
        both = flying + proposer.propose(5, after=flying).tokens
        if flying:
            assert both == proposer.propose(len(both)).tokens

    def test_asking_changes_nothing(self) -> None:
        proposer = self.proposer([1, 2, 3, 4, 1, 2, 3])
        before = proposer.propose(8)
        proposer.propose(4, after=[7, 7, 7])
        assert proposer.propose(8) == before

    @given(st.lists(texts, max_size=5))
    def test_parts_add_up(self, parts: list[list[int]]) -> None:
        at_once, in_parts = NgramProposer(), NgramProposer()
        at_once.extend([token for part in parts for token in part])
        for part in parts:
            in_parts.extend(part)
        assert in_parts.propose(8) == at_once.propose(8)

    @given(texts, st.integers(2, 16))
    def test_memory_is_bounded_and_the_recent_stays(self, text: list[int], bound: int) -> None:
        proposer = NgramProposer(NgramOptions(max_indexed_tokens=bound))
        for token in text:
            proposer.extend([token])
            assert len(proposer._index.tokens) <= bound
        recent = proposer._index.tokens
        assert recent == text[len(text) - len(recent) :]
        assert len(recent) >= min(len(text), bound // 2)

    def test_a_long_prompt_is_cut_to_its_end(self) -> None:
        proposer = self.proposer(range(1000), max_indexed_tokens=100)
        assert proposer._index.tokens == list(range(950, 1000))

    @pytest.mark.parametrize(
        "options", [{"min_match": 0}, {"tokens_per_match": 0}, {"max_indexed_tokens": 1}]
    )
    def test_options_that_make_no_sense_are_refused(self, options: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="must be positive"):
            NgramOptions(**options)

    @given(texts)
    def test_every_proposal_is_said_in_the_text_or_repeats_it(self, text: list[int]) -> None:
        proposed = self.proposed(text)
        assert set(pairwise([*text[-1:], *proposed])) <= set(pairwise([*text, *proposed[:1]]))
