"""Puts one answer together from the pieces of a response."""

from __future__ import annotations

import json
from typing import Any, Final

from mesh.bench.chunk import read_chunk
from mesh.bench.serve.event_stream import EventStream
from mesh.bench.serve.record import Failure, Heard

_DONE: Final = b"[DONE]"
# Of the body of a refusal; what comes after it is not for people.
_MAX_ERROR_BYTES: Final = 64 * 1024
_MAX_MESSAGE_CHARS: Final = 300


class AnswerReading:
    """Takes a response as it comes; implements `connection.Receiver`."""

    def __init__(self) -> None:
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._events = EventStream()
        self._refusal = b""
        self._parts_s: list[float] = []
        self._last_s: float | None = None
        self._usage: dict[str, Any] = {}
        self._finish: str | None = None
        self._is_done = False
        self._failure: Failure | None = None

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Status and headers, the names in lower case."""
        self._status, self._headers = status, headers

    def on_body(self, data: bytes, now_s: float) -> None:
        """The next bytes of the body."""
        if self._status != 200:
            self._refusal = (self._refusal + data)[:_MAX_ERROR_BYTES]
            return
        for event in self._events.feed(data):
            if event == _DONE:
                self._is_done = True
            else:
                self._take(event, now_s)

    @property
    def has_begun(self) -> bool:
        """Whether the server began to answer."""
        return self._status == 200

    def heard(self, failure: Failure | None = None) -> Heard:
        """What came.

        Args:
            failure: What ended it, if the response is not complete.
        """
        if failure is not None and failure.is_hang_up:
            # What the server had said before is not the client's doing.
            failure = self._failure or (failure if self._status in {0, 200} else None)
        return Heard(
            parts_s=tuple(self._parts_s),
            last_s=self._last_s,
            num_input_tokens=_count(self._usage, "prompt_tokens"),
            num_cached_tokens=_count(self._usage.get("prompt_tokens_details"), "cached_tokens"),
            num_output_tokens=_count(self._usage, "completion_tokens"),
            finish=self._finish,
            failure=failure or self._failure or self._shortcoming(),
        )

    def _take(self, event: bytes, now_s: float) -> None:
        try:
            chunk = read_chunk(json.loads(event))
        except (ValueError, TypeError, AttributeError):
            self._failure = self._failure or Failure("stream_error", f"no chunk of an answer: {_line(event)}")
            return
        if chunk.error is not None:
            self._failure = self._failure or Failure("stream_error", chunk.error[:_MAX_MESSAGE_CHARS])
        if chunk.usage:
            self._usage = chunk.usage
        if chunk.has_tokens:
            self._parts_s.append(now_s)
        if chunk.has_tokens or chunk.finish:
            self._last_s = now_s
        self._finish = chunk.finish or self._finish

    def _shortcoming(self) -> Failure | None:
        """What is wrong with a response that is complete as far as HTTP goes."""
        if self._status != 200:
            retry_after = self._headers.get(b"retry-after")
            return Failure(
                f"http_{self._status}",
                error_message(self._refusal),
                None if retry_after is None else retry_after.decode("latin-1"),
            )
        if self._finish is None and not self._is_done:
            if self._headers.get(b"content-type", b"").startswith(b"application/json"):
                return Failure("not_a_stream", "the server answered in one piece: it cannot stream")
            return Failure("broken_off", "the stream ended without a finish reason and without [DONE]")
        if self._last_s is None or self._usage.get("completion_tokens") == 0:
            return Failure("no_tokens", "the answer has no token")
        return None


def error_message(body: bytes) -> str:
    """What a server's refusal says, in one line: OpenAI's `error.message`, or the text as it is."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:_MAX_MESSAGE_CHARS]


def _count(fields: Any, name: str) -> int | None:
    found = fields.get(name) if isinstance(fields, dict) else None
    return found if isinstance(found, int) else None


def _line(event: bytes) -> str:
    return " ".join(event.decode(errors="replace").split())[:_MAX_MESSAGE_CHARS]
