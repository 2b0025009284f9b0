"""From events to an answer, and answers that are none."""

import json

import pytest

from meshbench.request_record import AnswerReading, Response
from tests.support.peer_server import ANSWER, DONE, END, USAGE, WORD


def response(*events: str, status: int = 200, headers: dict[bytes, bytes] | None = None) -> Response:
    """As it would be if an event came each second."""
    reading = AnswerReading()
    reading.on_head(status, headers or {})
    for now_s, event in enumerate(events):
        reading.on_body(event.encode(), float(now_s))
    return reading.response()


def test_an_answer_is_timed_by_its_parts() -> None:
    opening = 'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    assert response(opening, WORD, WORD, END, USAGE, DONE) == Response(
        parts_s=(1.0, 2.0), last_s=3.0, num_input_tokens=7, num_output_tokens=2, finish="length"
    )


def test_parts_that_come_together_are_parts_still() -> None:
    assert response(ANSWER).parts_s == (0.0, 0.0)


def test_cached_tokens_are_told_if_the_server_tells() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    event = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
    assert response(WORD, END, event).num_cached_tokens == 8
    assert response(ANSWER).num_cached_tokens is None


def test_an_answer_without_usage_or_without_done_is_an_answer() -> None:
    without_usage = response(WORD, END)
    assert (without_usage.failure, without_usage.num_output_tokens) == (None, None)
    without_finish = response(WORD, DONE)
    assert (without_finish.failure, without_finish.last_s) == (None, 0.0)


@pytest.mark.parametrize(
    ("events", "status", "headers", "kind", "words"),
    [
        ((WORD,), 200, {}, "broken_off", "without a finish reason"),
        ((WORD, 'data: {"error": {"message": "stage 2 went away"}}\n\n'), 200, {}, "stream_error", "stage 2"),
        (("data: {nonsense\n\n", END), 200, {}, "stream_error", "{nonsense"),
        (("data: [1]\n\n", END), 200, {}, "stream_error", "[1]"),
        (('data: {"choices": 5}\n\n', END), 200, {}, "stream_error", "choices"),
        ((DONE,), 200, {}, "no_tokens", "no token"),
        (('{"choices": []}',), 200, {b"content-type": b"application/json"}, "not_a_stream", "one piece"),
        (('{"error": {"message": "no\\nroom"}}',), 429, {}, "http_429", "no room"),
        (("<h1>Bad gateway</h1>",), 502, {}, "http_502", "Bad gateway"),
    ],
)
def test_what_is_no_answer_says_why(
    events: tuple[str, ...], status: int, headers: dict[bytes, bytes], kind: str, words: str
) -> None:
    failure = response(*events, status=status, headers=headers).failure
    assert failure is not None
    assert failure.kind == kind
    assert words in failure.message


def test_a_refusal_keeps_its_retry_after() -> None:
    failure = response("full", status=429, headers={b"retry-after": b"5"}).failure
    assert failure is not None
    assert failure.retry_after == "5"
