"""Incremental text: whatever the tokens and chunks, the same characters come out."""

import itertools
from typing import AnyStr

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.text.detokenizer import AnswerText, StopScanner

# A small alphabet makes overlaps, repeats and near misses of stop strings common.
_crowded_text = st.text(alphabet="ab\u00e9\U0001f642", max_size=30)
_crowded_stops = st.lists(st.text(alphabet="ab\u00e9\U0001f642", min_size=1, max_size=4), max_size=4)


def _split(data: AnyStr, cuts: list[int]) -> list[AnyStr]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(edges)]


def _cut_at_earliest(text: str, stops: list[str]) -> str:
    return min((text.split(stop, 1)[0] for stop in stops), key=len, default=text)


def _run(pieces: list[bytes], stops: list[str]) -> tuple[str, bool]:
    answer = AnswerText(lambda token: pieces[token], stops)
    settled = [answer.push(token) for token in range(len(pieces))]
    return "".join(settled) + answer.flush(), answer.stopped


@given(st.text(), st.lists(st.integers(min_value=0)))
def test_any_split_of_a_text_into_tokens_gives_the_text(text: str, cuts: list[int]) -> None:
    assert _run(_split(text.encode(), cuts), []) == (text, False)


@given(st.binary(), st.lists(st.integers(min_value=0)))
def test_any_split_of_any_bytes_gives_what_decoding_them_whole_gives(data: bytes, cuts: list[int]) -> None:
    assert _run(_split(data, cuts), []) == (data.decode("utf-8", "replace"), False)


@given(_crowded_text, _crowded_stops, st.lists(st.integers(min_value=0)))
def test_stops_cut_the_text_where_the_earliest_begins(text: str, stops: list[str], cuts: list[int]) -> None:
    expected = _cut_at_earliest(text, stops)
    assert _run(_split(text.encode(), cuts), stops) == (expected, any(stop in text for stop in stops))


@given(_crowded_text, _crowded_stops, st.lists(st.integers(min_value=0)))
def test_what_was_passed_on_never_has_to_be_taken_back(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner = StopScanner(stops)
    passed_on = ""
    for chunk in _split(text, cuts):
        passed_on += scanner.push(chunk)
        assert _cut_at_earliest(text, stops).startswith(passed_on)


@given(_crowded_text, _crowded_stops, st.lists(st.integers(min_value=0)))
def test_the_stop_string_is_passed_on_for_those_who_want_it(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    scanner = StopScanner(stops, includes_stop=True)
    passed_on = "".join(map(scanner.push, _split(text, cuts))) + scanner.flush()
    assert passed_on == _cut_at_earliest(text, stops) + (scanner.found or "")


def test_holds_back_no_more_than_the_start_of_a_stop() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("the E") == "the "
    assert scanner.push("N") == ""
    assert scanner.push("T") == "ENT"
    assert not scanner.stopped


def test_a_character_appears_with_its_last_byte() -> None:
    pieces = [b"\xf0\x9f", b"\x99", b"\x82"]
    answer = AnswerText(pieces.__getitem__)
    assert [answer.push(token) for token in range(3)] == ["", "", "\U0001f642"]


def test_half_a_character_at_the_end_is_replaced() -> None:
    answer = AnswerText([b"a\xf0\x9f"].__getitem__)
    assert answer.push(0) == "a"
    assert answer.flush() == "\ufffd"


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (["xab", "cd"], "x"),  # the longer stop began first
        (["xab", "ce"], "xa"),  # it did not come: the shorter one inside it counts
        (["xabc"], "xa"),  # nor at the end of the text
    ],
)
def test_of_overlapping_stops_the_one_that_starts_first_wins(chunks: list[str], expected: str) -> None:
    scanner = StopScanner(["abcd", "b"])
    assert "".join(map(scanner.push, chunks)) + scanner.flush() == expected
    assert scanner.stopped
