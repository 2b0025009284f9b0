"""Counting the values of a JSON text without parsing it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.api.request_parsing import has_at_most, max_values

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.just('[{,"\\",\\\\'),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=5), inner, max_size=8),
    max_leaves=40,
)


def count(value: Any) -> int:
    """Containers, and commas between their members."""
    if isinstance(value, dict | list):
        members = list(value.values()) if isinstance(value, dict) else value
        return 1 + max(0, len(members) - 1) + sum(map(count, members))
    return 0


@given(value=VALUES, is_ascii=st.booleans())
def test_text_does_not_count_whatever_it_holds(value: Any, *, is_ascii: bool) -> None:
    data = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    # A text alone is a value, too.
    most = max(1, count(value))
    assert has_at_most(data, most)
    if most > 1:
        assert not has_at_most(data, most - 1)


def count_outside_strings(data: bytes) -> int:
    """Commas and brackets, read byte by byte: a backslash escapes wherever it stands."""
    total, is_string, at = 0, False, 0
    while at < len(data):
        if data[at : at + 2] in {b"\\\\", b'\\"'}:
            at += 1
        elif data[at : at + 1] == b'"':
            is_string = not is_string
        elif not is_string and data[at] in b",[{":
            total += 1
        at += 1
    return total


PARTS = st.sampled_from([b'"', b'\\"', b"\\", b",", b"[", b"{", b"]", b"a", b"\xff"])


@given(data=st.lists(PARTS, max_size=40).map(b"".join) | st.binary(max_size=200))
def test_what_is_no_json_is_counted_likewise(data: bytes) -> None:
    most = count_outside_strings(data)
    # So many strings are too many, too.
    assert has_at_most(data, most) or data.count(b'"') > 4 * most
    assert most == 0 or not has_at_most(data, most - 1)


@pytest.mark.parametrize("part", [b"[],", b"1,", b"{},", b'"",', b"[[[[]]]],", b'{"a":1},', b'"\\"",'])
def test_a_hostile_body_is_seen_through(part: bytes) -> None:
    data = b'{"x":[' + part * (2**21 // len(part)) + b"0]}"
    assert not has_at_most(data, max_values(4096))


@pytest.mark.parametrize("context_length", [64, 4096, 2**17])
def test_a_full_context_of_ids_and_a_long_text_pass(context_length: int) -> None:
    ids = json.dumps({"prompt": [12345] * context_length, "logit_bias": {str(i): 1 for i in range(1024)}})
    assert has_at_most(ids.encode(), max_values(context_length))
    text = json.dumps({"messages": [{"role": "user", "content": 'a, [b], {c}, "d"\\\n' * 50_000}]})
    assert has_at_most(text.encode(), max_values(context_length))
