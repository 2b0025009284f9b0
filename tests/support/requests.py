"""Requests that are sent from the process of a test."""

import asyncio

from meshbench.load_client.answers import AnswerRecord
from meshbench.load_client.process import send
from meshbench.load_client.schedule import Request, Schedule
from meshbench.request_record import Record


def answer_here(url: str, request: Request, api_key: str | None = None) -> AnswerRecord:
    """The answer to a request; MeshError if there is none, or none that was counted."""
    return asyncio.run(send(Schedule.once(url, (request,), api_keys=(api_key,)))).counted(url).answers[0]


def timed_answer(
    text: str, num_tokens: int, *arrivals_ms: float, token_ids: tuple[int, ...] = ()
) -> AnswerRecord:
    """An answer whose parts arrived at these times, of a request that was sent at 0."""
    parts_s = tuple(arrival_ms / 1e3 for arrival_ms in arrivals_ms)
    last_s = parts_s[-1]
    record = Record(
        0, "request", 0.0, 0.0, 0.0, last_s, parts_s, last_s, num_output_tokens=num_tokens, has_usage=True
    )
    return AnswerRecord(record, text, token_ids)
