"""The n-gram proposer: continuing, departing, coming back."""

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.lookup_proposers import NgramOptions, NgramProposer, PredictionProposer
from speculative.proposer import EMPTY

# Read in several parts.
LONG = Random(1).choices(range(50_000), k=30_000)
texts = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), max_size=40))


def proposer_of(prompt: Sequence[int], answer: Sequence[int] = (), **options: float) -> NgramProposer:
    proposer = NgramProposer(NgramOptions(**options))  # type: ignore[arg-type]
    proposer.extend(prompt)
    for token in answer:
        proposer.extend([token])
    return proposer


def proposed(prompt: Sequence[int], answer: Sequence[int] = (), max_tokens: int = 8) -> list[int]:
    return list(proposer_of(prompt, answer, tokens_per_evidence=2.0).propose(max_tokens).tokens)


class TestWhatItProposes:
    def test_continues_as_it_did_the_last_time(self) -> None:
        text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 8, 1, 2, 3]
        assert proposed(text) == [5, 6, 7, 8, 1, 2, 3, 5]

    def test_a_longer_match_outweighs_a_later_one(self) -> None:
        text = [0, 1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 0, 1, 2, 3]
        assert proposed(text, max_tokens=2) == [4, 9]

    def test_a_loop_goes_on_beyond_what_is_known(self) -> None:
        assert proposed([1, 2, 3] * 3, max_tokens=6) == [1, 2, 3, 1, 2, 3]

    @pytest.mark.parametrize("text", [[], [1], [1, 2, 3], [1, 2, 3, 1]])
    def test_says_nothing_without_a_match(self, text: list[int]) -> None:
        assert proposer_of(text).propose(8) == EMPTY

    @pytest.mark.parametrize("max_tokens", [0, -1])
    def test_says_nothing_when_asked_for_nothing(self, max_tokens: int) -> None:
        assert proposer_of([1, 2, 1, 2]).propose(max_tokens) == EMPTY

    def test_proposes_more_the_longer_it_was_right(self) -> None:
        page = list(range(1000))
        widths = [len(proposer_of(page, page[:count]).propose(99).tokens) for count in (2, 3, 8, 20, 80)]
        assert widths == sorted(widths)
        assert widths[0] < 16
        assert widths[-1] == 99

    def test_options_set_the_scale(self) -> None:
        page = list(range(100))
        shy = proposer_of(page, page[:3], tokens_per_evidence=0.5)
        bold = proposer_of(page, page[:3], tokens_per_evidence=5.0)
        assert len(shy.propose(99).tokens) < len(bold.propose(99).tokens)

    def test_how_a_prompt_ends_says_little_of_how_the_answer_begins(self) -> None:
        """A chat template ends every turn alike."""
        template = list(range(30))
        proposal = proposer_of([*template, 50, 51, 52, *template]).propose(16)
        assert len(proposal.tokens) < 8
        assert proposal.confidences[0] < 0.5


PAGE = list(range(100, 200))


class TestComingBack:
    """A page is given back with a change; `9` is what the page never says."""

    @pytest.mark.parametrize(
        ("answer", "expected"),
        [
            ([*PAGE[:20], 9, PAGE[21]], PAGE[22:24]),  # one token replaced
            ([*PAGE[:20], 9, 9, 9, PAGE[20]], PAGE[21:23]),  # some inserted
            ([*PAGE[:20], PAGE[25]], PAGE[26:28]),  # some left out
            ([*PAGE[:20], 9, 9, PAGE[40]], PAGE[41:43]),  # many replaced by a few
        ],
    )
    def test_one_token_of_the_page_is_enough(self, answer: list[int], expected: list[int]) -> None:
        # Each also stands once elsewhere, later: only the place where the page was left tells them apart.
        prompt = [*PAGE, *(7 + token for token in range(5)), *(999 - token for token in PAGE), *PAGE[::-1], 1]
        assert proposed(prompt, answer)[:2] == expected

    def test_a_token_far_behind_is_not_enough(self) -> None:
        assert proposed(PAGE, [*PAGE[:3], 9, PAGE[90]]) == []

    def test_a_quotation_in_between_is_followed_and_left_again(self) -> None:
        quoted = list(range(500, 540))
        prompt = [*quoted, 1, *PAGE]
        answer = [*PAGE[:30], 9, *quoted[10:16]]
        assert proposed(prompt, answer)[:2] == quoted[16:18]
        assert proposed(prompt, [*answer, PAGE[30]])[:2] == PAGE[31:33]


class TestConfidence:
    def test_grows_with_what_came_true(self) -> None:
        page = list(range(400))
        first = [proposer_of(page, page[:count]).propose(8).confidences[0] for count in (2, 4, 16, 64, 256)]
        assert first == sorted(first)
        assert first[0] < 0.7
        assert first[-1] > 0.98

    def test_falls_where_nothing_comes_true(self) -> None:
        """Every other token begins a repeat that never comes."""
        proposer = proposer_of([1, 2, 3] * 2)
        before = proposer.propose(1).confidences[0]
        for token in range(100, 160):
            proposer.extend([1])
            proposer.extend([2])
            proposer.extend([token])
        proposer.extend([1])
        proposer.extend([2])
        assert proposer.propose(1).confidences[0] < before / 2

    @given(texts, texts, st.integers(1, 30))
    def test_is_a_chance_for_each_token(self, prompt: list[int], answer: list[int], count: int) -> None:
        proposal = proposer_of(prompt, answer).propose(count)
        assert len(proposal.confidences) == len(proposal.tokens) <= count
        assert all(0.0 <= confidence <= 1.0 for confidence in proposal.confidences)
        assert proposal.proposer == ("ngram" if proposal.tokens else "")


@given(texts, texts, st.integers(0, 12))
def test_tokens_in_flight_chain(prompt: list[int], answer: list[int], count: int) -> None:
    """What is proposed after a window in flight is what would have been proposed in one longer window."""
    proposer = proposer_of(prompt, answer, tokens_per_evidence=99.0)
    flying = proposer.propose(count).tokens
    both = flying + proposer.propose(5, after=flying).tokens
    if flying:
        assert both == proposer.propose(len(both)).tokens


@given(texts, texts, st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_what_is_in_flight_counts_as_said(prompt: list[int], answer: list[int], flying: list[int]) -> None:
    """Unless it repeats itself, in which case tokens in flight are not known text yet."""
    page = [token + 10 * (place // 4) for place, token in enumerate(prompt)]
    asked = proposer_of(page, answer).propose(4, after=flying)
    said = proposer_of(page, answer)
    said.extend(flying)
    assert asked.tokens[:1] in {said.propose(4).tokens[:1], ()} or set(flying) & set(answer)


@given(texts, texts)
def test_asking_changes_nothing(prompt: list[int], answer: list[int]) -> None:
    proposer = proposer_of(prompt, answer)
    before = proposer.propose(8)
    proposer.propose(4, after=[7, 7, 7])
    assert proposer.propose(8) == before


@given(texts, texts, st.lists(texts, max_size=3))
def test_never_proposes_what_was_never_said(
    prompt: list[int], answer: list[int], parts: list[list[int]]
) -> None:
    proposer = proposer_of(prompt, answer)
    for part in parts:
        proposer.extend(part)
    text = [*prompt, *answer, *(token for part in parts for token in part)]
    tokens = list(proposer.propose(8).tokens)
    assert set(tokens) <= set(text)
    # Where nothing near an anchor is guessed, what is proposed was said in this very order.
    assert set(pairwise(tokens)) <= set(pairwise([*text, *tokens[:1]]))


@given(texts, texts, st.integers(2, 16))
def test_memory_is_bounded(prompt: list[int], answer: list[int], bound: int) -> None:
    proposer = NgramProposer(NgramOptions(max_indexed_tokens=bound))
    proposer.extend(prompt)
    for token in answer:
        proposer.extend([token])
        assert proposer._index.stop - proposer._index.first <= bound
        proposer.propose(8, after=answer[:3])


def test_a_long_text_is_followed_beyond_what_is_remembered() -> None:
    """A page repeated for longer than the memory: text that is being copied stays known."""
    page = list(range(500))
    proposer = NgramProposer(NgramOptions(max_indexed_tokens=2000))
    proposer.extend(page)
    for start in range(0, 5000, 10):
        proposer.extend([page[place % 500] for place in range(start, start + 10)])
    assert list(proposer.propose(20).tokens) == page[:20]


def test_of_a_long_prompt_only_the_end_is_indexed() -> None:
    prompt = [1, 2, 3, 4, *range(100, 5100), 6, 7, 8, 9, *range(6000, 6500), 6, 7, 8]
    proposer = proposer_of(prompt, max_indexed_tokens=1000)
    assert proposer._index.stop == proposer._index.first + 999 == 999
    assert list(proposer.propose(2).tokens) == [9, 6000]
    # What would be dropped again is never entered.
    assert proposer_of([*prompt[:-3], 1, 2, 3], max_indexed_tokens=1000).propose(2) == EMPTY


def test_a_token_takes_little_memory() -> None:
    index = proposer_of(range(8000))._index
    grams = (*index._young, *index._old)
    entries = sum(map(len, grams))
    num_bytes = (
        sum(map(sys.getsizeof, grams)) + entries * 2 * sys.getsizeof(2**60) + sys.getsizeof(index._tokens)
    )
    assert num_bytes / 8000 < 600


@pytest.mark.parametrize("options", [{"tokens_per_evidence": 0}, {"max_indexed_tokens": 1}])
def test_options_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        NgramOptions(**options)


@pytest.mark.parametrize("make", [NgramProposer, lambda: PredictionProposer(LONG)])
@pytest.mark.parametrize("num_parts", [0, 2, 99])
def test_a_long_text_says_the_same_however_much_of_it_was_read_before(
    make: Callable[[], NgramProposer | PredictionProposer], num_parts: int
) -> None:
    ready, late = make(), make()
    for proposer in (ready, late):
        proposer.extend(LONG)
    while ready.read_on():
        pass
    for _ in range(num_parts):
        late.read_on()
    for place in (25_000, 100, 14_000):
        committed = LONG[place : place + 20]
        for proposer in (ready, late):
            proposer.extend(committed)
        said = ready.propose(16)
        assert said.tokens == tuple(LONG[place + 20 : place + 20 + len(said.tokens)]) != ()
        assert late.propose(16) == said
