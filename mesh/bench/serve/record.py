"""What is noted of one request. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# Kinds of failure that are counted apart from errors.
REJECTED: Final = "http_429"
UNFINISHED: Final = "unfinished"
# The client closed the connection before the end of the answer, as it was told to.
HUNG_UP: Final = "hung_up"


@dataclass(frozen=True)
class Failure:
    """Why a request has no answer.

    Attributes:
        kind: `http_STATUS`, `connection`, `timeout`, `stream_error` (the server said so in the middle of its
            answer), `broken_off` (it stopped without a word), `not_a_stream`, `no_tokens`, `unfinished` (the
            run was ended first), or `hung_up` (the client was told to leave early).
        message: What the server or the network said, one line.
        retry_after: The header of that name, as it came.
    """

    kind: str
    message: str
    retry_after: str | None = None

    @property
    def is_hang_up(self) -> bool:
        """Whether it is the client's own doing: then nothing has failed."""
        return self.kind == HUNG_UP


@dataclass(frozen=True)
class Heard:
    """What came back. Times are the clock's.

    Attributes:
        parts_s: When each part of the answer came: a chunk in which the model said something.
        last_s: When the last chunk with a choice came, the one with the finish reason; None without any.
        num_input_tokens: The server's count; None if it sent none.
        num_cached_tokens: How many of them the server says it had computed before; None if it does not say.
        num_output_tokens: The server's count; None if it sent none.
        finish: Why the answer ended.
        failure: Why there is none, or not all of it.
    """

    parts_s: tuple[float, ...] = ()
    last_s: float | None = None
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    finish: str | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Record:
    """One request, from its schedule to its end. Times are in seconds from the start of the run.

    Attributes:
        number: From 0, in the order of the schedule.
        prompt_id: What was asked.
        scheduled_s: When it was to be sent. In a closed loop, when its place became free.
        ready_s: When it had a place under the limit of requests under way.
        sent_s: When it was sent, its connection not yet open unless an earlier request left one.
        ended_s: When it was over, in whatever way.
        parts_s: When each part of the answer came.
        last_s: When the last chunk with a choice came; `ended_s` without any.
        num_input_tokens: The server's count, or None.
        num_cached_tokens: The server's count, or None.
        num_output_tokens: The server's count; that of the parts, if there is none.
        has_usage: Whether the server counted.
        finish: Why the answer ended.
        failure: Why there is none; None if all went well.
    """

    number: int
    prompt_id: str
    scheduled_s: float
    ready_s: float
    sent_s: float
    ended_s: float
    parts_s: tuple[float, ...] = field(default=(), repr=False)
    last_s: float = 0.0
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    has_usage: bool = False
    finish: str | None = None
    failure: Failure | None = None

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
        """How long it waited here for a place under the limit of requests under way."""
        return (self.ready_s - self.scheduled_s) * 1e3

    @property
    def lag_ms(self) -> float:
        """How late it was sent through the fault of this client, after it had its place."""
        return (self.sent_s - self.ready_s) * 1e3

    @property
    def delay_ms(self) -> float:
        """From its schedule to its sending: what latencies that count from the schedule have on top."""
        return (self.sent_s - self.scheduled_s) * 1e3
