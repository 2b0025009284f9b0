"""The n-gram index against brute force."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.ngram_search import MAX_ORDER, ORDERS, NgramIndex

# Few letters: nearly everything repeats.
texts = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), max_size=60))
parts = st.lists(texts, max_size=6)


def index_of(text: Sequence[int], max_tokens: int = 10_000) -> NgramIndex:
    index = NgramIndex(max_tokens)
    index.extend(text)
    return index


def agreement(text: Sequence[int], end: int, context: Sequence[int]) -> int:
    length = 0
    while length < min(MAX_ORDER, end, len(context)) and text[end - length - 1] == context[-length - 1]:
        length += 1
    return length


def latest_of_longest_order(text: Sequence[int], context: Sequence[int]) -> int | None:
    """Where the longest n-gram that ends the context, of those lengths that are indexed, ended last."""
    for order in reversed(ORDERS):
        for end in range(len(text) - 1, order - 1, -1):
            if order <= len(context) and list(text[end - order : end]) == list(context[-order:]):
                return end
    return None


@given(texts, texts)
def test_finds_the_latest_occurrence_of_the_longest_match(text: list[int], context: list[int]) -> None:
    found = index_of(text).find(context)
    expected = latest_of_longest_order(text, context)
    if expected is None:
        assert found is None
    else:
        assert found == (expected, agreement(text, expected, context))


@given(parts)
def test_text_in_parts_is_the_text(parts: list[list[int]]) -> None:
    in_parts = NgramIndex(10_000)
    for part in parts:
        in_parts.extend(part)
    text = [token for part in parts for token in part]
    at_once = index_of(text)
    assert in_parts.read(0, in_parts.stop) == text
    for end in range(len(text) + 1):
        assert in_parts.find(text[:end]) == at_once.find(text[:end])


@given(texts, st.integers(0, 59), st.integers(1, 60), texts, texts)
def test_a_copy_need_not_be_indexed_again(
    text: list[int], source: int, count: int, more: list[int], context: list[int]
) -> None:
    """Every context that is found with the copy indexed is found without it, by as long an n-gram."""
    copied = text[source : source + count]
    whole, sparing = index_of(text), index_of(text)
    whole.extend([*copied, *more])
    sparing.extend([*copied, *more], len(copied))
    everything = [*text, *copied, *more]
    for tail in (context, everything, *([*everything[:end]] for end in range(len(everything)))):
        expected, found = whole.find(tail), sparing.find(tail)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert agreement(everything, found.end, tail) == found.length
            assert longest_order(found.length) == longest_order(expected.length)


def longest_order(length: int) -> int:
    return max(order for order in ORDERS if order <= length)


@given(parts, st.integers(2, 40))
def test_memory_is_bounded_and_the_recent_stays(parts: list[list[int]], max_tokens: int) -> None:
    index = NgramIndex(max_tokens)
    text: list[int] = []
    for part in parts:
        index.extend(part)
        text += part
        kept = index.stop - index.first
        assert index.stop == len(text)
        assert min(len(text), max_tokens // 2) <= kept <= max_tokens
        assert index.read(index.first, index.stop) == text[index.first :]
        for generation in (*index._young, *index._old):
            assert len(generation) <= max_tokens // 2 + 1
        for end in range(len(text)):
            found = index.find(text[:end])
            assert found is None or index.first <= found.end < index.stop


@given(texts, st.integers(0, 3), st.integers(0, 60), st.integers(0, 60))
def test_finds_a_lone_token_nearby(text: list[int], token: int, start: int, stop: int) -> None:
    places = [place for place in range(start, min(stop, len(text))) if text[place] == token]
    assert index_of(text).find_near(token, start, stop) == (places[0] if places else None)


def test_nothing_is_found_before_what_was_forgotten() -> None:
    index = index_of([*range(100), *range(200, 230)], max_tokens=40)
    assert index.first > 0
    assert index.find([50, 51]) is None
    assert index.find_near(50, 0, 60) is None
    assert index.find([220, 221]) == (122, 2)


def test_an_index_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens is 1"):
        NgramIndex(1)
