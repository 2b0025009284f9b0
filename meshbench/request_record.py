"""Record of one request, made from its stream of server-sent events."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from mesh.util.completion_stream import DONE, MAX_MESSAGE_CHARS, EventStream, error_message, read_chunk

if TYPE_CHECKING:
    from mesh.util.completion_stream import Chunk

# Kinds of failure that are counted apart from errors.
REJECTED: Final = "http_429"
UNFINISHED: Final = "unfinished"
# The client closed the connection before the end of the answer, as ordered.
HUNG_UP: Final = "hung_up"
# Of the body of a refusal; what comes after it is not for people.
_MAX_ERROR_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class Failure:
    """Reason why a request has no answer."""

    kind: str
    """`http_STATUS`, `connection`, `timeout`, `stream_error` (an error in the middle of the answer),
    `broken_off` (it stopped without an error), `not_a_stream`, `no_tokens`, `unfinished` (the run was ended
    first), or `hung_up` (the client closed the connection early, as planned)."""
    message: str
    """Text of the server or the network, one line."""
    retry_after: str | None = None
    """The header of that name."""

    @property
    def is_hang_up(self) -> bool:
        """Whether it is the client's own doing: then nothing has failed."""
        return self.kind == HUNG_UP


@dataclass(frozen=True)
class Response:
    """A response, as far as it came. Times are the clock's."""

    parts_s: tuple[float, ...] = ()
    """Arrival of each chunk with generated tokens."""
    last_s: float | None = None
    """When the last chunk with a choice came, the one with the finish reason; None without any."""
    num_input_tokens: int | None = None
    """The server's count; None if it sent none."""
    num_cached_tokens: int | None = None
    """Of them, tokens that the server had computed before; None if unknown."""
    num_output_tokens: int | None = None
    """The server's count; None if it sent none."""
    finish: str | None = None
    """Why the answer ended."""
    failure: Failure | None = None
    """Why there is none, or not all of it."""


@dataclass(frozen=True)
class Record:
    """One request, from schedule to end. Times are seconds from the start of the run, or those of a clock."""

    number: int
    """From 0, in the order of the schedule."""
    prompt_id: str
    """Id of the prompt."""
    scheduled_s: float
    """When it was to be sent. In a closed loop, when its place became free."""
    ready_s: float
    """When it had a place under the limit of requests under way."""
    sent_s: float
    """When it was sent, its connection not yet open unless an earlier request left one."""
    ended_s: float
    """When it was over, in whatever way."""
    parts_s: tuple[float, ...] = field(default=(), repr=False)
    """Arrival of each chunk with generated tokens."""
    last_s: float = 0.0
    """When the last chunk with a choice came; `ended_s` without any."""
    num_input_tokens: int | None = None
    """The server's count, or None."""
    num_cached_tokens: int | None = None
    """The server's count, or None."""
    num_output_tokens: int = 0
    """The server's count; that of the parts, if there is none."""
    has_usage: bool = False
    """Whether the server counted."""
    finish: str | None = None
    """Why the answer ended."""
    failure: Failure | None = None
    """Why there is none; None if all went well."""

    def with_answer(self, response: Response, start_s: float = 0.0) -> Record:
        """The same request with its answer.

        Args:
            response: The answer; its times are a clock's.
            start_s: When the run began by that clock, in seconds.
        """
        counted = response.num_output_tokens
        return replace(
            self,
            parts_s=tuple(part_s - start_s for part_s in response.parts_s),
            last_s=self.ended_s if response.last_s is None else response.last_s - start_s,
            num_input_tokens=response.num_input_tokens,
            num_cached_tokens=response.num_cached_tokens,
            num_output_tokens=len(response.parts_s) if counted is None else counted,
            has_usage=counted is not None,
            finish=response.finish,
            failure=response.failure,
        )

    @property
    def ttft_ms(self) -> float:
        """Time to first token: from sending the request to the first part of its answer.

        An answer that ends without a part, because its first token ends it, counts to its end.
        """
        return ((self.parts_s[0] if self.parts_s else self.last_s) - self.sent_s) * 1e3

    @property
    def e2el_ms(self) -> float:
        """End-to-end latency: from sending the request to the end of its answer."""
        return (self.last_s - self.sent_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token but the first: (E2EL - TTFT) / (output tokens - 1); None below two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el_ms - self.ttft_ms) / (self.num_output_tokens - 1)

    @property
    def itls_ms(self) -> tuple[float, ...]:
        """Inter-token latencies: from each part to the next. A part may hold several tokens."""
        return tuple(
            (later - earlier) * 1e3 for earlier, later in zip(self.parts_s, self.parts_s[1:], strict=False)
        )

    @property
    def queue_ms(self) -> float:
        """How long it waited for the client's limit of concurrent requests."""
        return (self.ready_s - self.scheduled_s) * 1e3

    @property
    def lag_ms(self) -> float:
        """Delay caused by this client, after it had a place."""
        return (self.sent_s - self.ready_s) * 1e3

    @property
    def delay_ms(self) -> float:
        """From its schedule to its sending: what latencies that count from the schedule have on top."""
        return (self.sent_s - self.scheduled_s) * 1e3


class AnswerReading:
    """Takes a response as it comes; implements `http_client.Receiver`."""

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
            self.on_event(event, now_s)

    def on_event(self, event: bytes, now_s: float) -> None:
        """The next event: a chunk, or `[DONE]`."""
        if event == DONE:
            self._is_done = True
            return
        try:
            fields: dict[str, Any] = json.loads(event)
            chunk = read_chunk(fields)
        except (ValueError, TypeError, AttributeError):
            self._failure = self._failure or Failure(
                "stream_error", f"not a chunk of an answer: {_line(event)}"
            )
            return
        self.on_chunk(chunk, fields, now_s)

    def on_chunk(self, chunk: Chunk, fields: dict[str, Any], now_s: float) -> None:  # noqa: ARG002 - subclasses
        """The next chunk, and the JSON that it was read from."""
        if chunk.error is not None:
            self._failure = self._failure or Failure("stream_error", chunk.error[:MAX_MESSAGE_CHARS])
        if chunk.usage:
            self._usage = chunk.usage
        if chunk.has_tokens:
            self._parts_s.append(now_s)
        if chunk.has_tokens or chunk.finish:
            self._last_s = now_s
        self._finish = chunk.finish or self._finish

    @property
    def has_begun(self) -> bool:
        """Whether the server began to answer."""
        return self._status == 200

    @property
    def last_part_s(self) -> float | None:
        """Arrival of the latest chunk with generated tokens; None before the first."""
        return self._parts_s[-1] if self._parts_s else None

    def response(self, failure: Failure | None = None) -> Response:
        """What came.

        Args:
            failure: What ended it, if the response is not complete.
        """
        if failure is not None and failure.is_hang_up:
            # Data that arrived before the client's error count.
            failure = self._failure or (failure if self._status in {0, 200} else None)
        return Response(
            parts_s=tuple(self._parts_s),
            last_s=self._last_s,
            num_input_tokens=_count(self._usage, "prompt_tokens"),
            num_cached_tokens=_count(self._usage.get("prompt_tokens_details"), "cached_tokens"),
            num_output_tokens=_count(self._usage, "completion_tokens"),
            finish=self._finish,
            failure=failure or self._failure or self._shortcoming(),
        )

    def _shortcoming(self) -> Failure | None:
        """Errors of a response that is complete as HTTP."""
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


def _count(fields: Any, name: str) -> int | None:
    found = fields.get(name) if isinstance(fields, dict) else None
    return found if isinstance(found, int) else None


def _line(event: bytes) -> str:
    return " ".join(event.decode(errors="replace").split())[:MAX_MESSAGE_CHARS]
