"""The free text of a custom tool's call, out of JSON that comes in pieces."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.api.custom_calls import FreeTextReader, free_text


@given(text=st.text(), escapes=st.booleans(), cuts=st.lists(st.integers(0, 200)), key=st.text(max_size=5))
def test_a_text_comes_back_however_it_is_cut(text: str, cuts: list[int], key: str, *, escapes: bool) -> None:
    arguments = json.dumps({key: text}, ensure_ascii=escapes)
    reader = FreeTextReader()
    places = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    pieces = [arguments[begin:end] for begin, end in pairwise(places)]
    assert "".join(map(reader.push, pieces)) + reader.flush() == text
    assert free_text(arguments) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut\\"),
        ('{ "code" : "x" }', "x"),
        ("{}", "{}"),
        ('{"input": 5}', '{"input": 5}'),
        ("[1]", "[1]"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "\\ud83dx\\n"}', "\ufffdx\n"),
        ("", ""),
        ('{"' + "x" * 300, '{"' + "x" * 300),
    ],
)
def test_what_is_no_text_alone_is_passed_on(arguments: str, text: str) -> None:
    assert free_text(arguments) == text
