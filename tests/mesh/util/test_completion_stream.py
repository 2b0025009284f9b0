"""From bytes to events, from events to chunks, and the text of a refusal."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.util.completion_stream import Chunk, EventStream, error_message, read_chunk

STREAM = (
    b': ping\n\nevent: x\ndata: {"a": 1}\n\ndata:{"b": "\xc3\xa9"}\r\n\r\n'
    b"data: one\ndata: two\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', '{"b": "é"}'.encode(), b"one\ntwo", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_are_the_same_however_the_network_cuts_the_stream(places: list[int]) -> None:
    stream = EventStream()
    cuts = [0, *sorted(places), len(STREAM)]
    pieces = [STREAM[start:stop] for start, stop in itertools.pairwise(cuts)]
    assert [event for piece in pieces for event in stream.feed(piece)] == EVENTS


def test_an_event_comes_with_the_bytes_that_complete_it() -> None:
    stream = EventStream()
    assert stream.feed(b"data: x\n") == []
    assert stream.feed(b"\ndata: y") == [b"x"]


@pytest.mark.parametrize(
    ("fields", "chunk"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, Chunk()),
        ({"choices": [{"delta": {"content": "x"}, "finish_reason": None}]}, Chunk("x", has_tokens=True)),
        ({"choices": [{"text": "x", "token_ids": [7]}]}, Chunk("x", (7,), has_tokens=True)),
        ({"choices": [{"delta": {"content": None, "reasoning_content": "x"}}]}, Chunk(has_tokens=True)),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, Chunk(has_tokens=True)),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, Chunk(finish="stop")),
        ({"choices": [], "usage": {"prompt_tokens": 1}}, Chunk(usage={"prompt_tokens": 1})),
        ({"choices": [], "usage": [1]}, Chunk()),
        ({"error": {"message": "stage 2 went away"}}, Chunk(error="stage 2 went away")),
        ({"error": "no memory"}, Chunk(error="no memory")),
    ],
)
def test_a_chunk_says_what_it_brings(fields: dict[str, object], chunk: Chunk) -> None:
    assert read_chunk(fields) == chunk


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"detail": "too long"}', '{"detail": "too long"}'),
        (b"too\n  long", "too long"),
        (b"\xff", "\ufffd"),
        (b"x" * 1000, "x" * 300),
    ],
)
def test_a_refusal_is_one_line(body: bytes, message: str) -> None:
    assert error_message(body) == message
