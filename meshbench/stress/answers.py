"""Orders to the load client and the answers it records, also of clients that hang up."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.util.completion_stream import DONE
from meshbench.request_record import HUNG_UP, AnswerReading, Failure, Record

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from mesh.util.completion_stream import Chunk
    from meshbench.http_client import Client

# Of those that hang up in the middle of a stream: at once, before the first token, or right at the end. The
# others leave at some token between.
_AT_ONCE: Final = 0.2
_EARLY: Final = 0.35
_LATE: Final = 0.15
# From the way to the server to several chunks of a prompt.
_LEAST_S: Final = 0.0005
_EARLY_S: Final = 1.0
_WHOLE_S: Final = 4.0
# After a token, and after the last one.
_BETWEEN_S: Final = 0.03
_END_S: Final = 0.003


@dataclass(frozen=True)
class AnswerRecord:
    """A request and its answer.

    Attributes:
        record: Times, counts, failure.
        text: The answer.
        token_ids: Its tokens; none if the server does not send them.
        faults: Violations by the stream, apart from a failure.
    """

    record: Record
    text: str
    token_ids: tuple[int, ...]
    faults: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> AnswerRecord:
        """Restores `as_dict`'s result after JSON, which has no tuples."""
        record = dict(fields["record"])
        if record["failure"] is not None:
            record["failure"] = Failure(**record["failure"])
        record["parts_s"] = tuple(record["parts_s"])
        return cls(Record(**record), fields["text"], tuple(fields["token_ids"]), tuple(fields["faults"]))


@dataclass(frozen=True)
class Order:
    """A load for one server.

    Attributes:
        url: URL of the server, without `/v1`.
        ids: Of the chats.
        bodies: Of each chat, its requests as JSON.
        num_at_once: Requests under way in a closed loop.
        num_requests: Most requests; None for no such limit.
        duration_s: Longest time; None for no such limit.
        arrivals_s: Instead of a closed loop: when the first request of each chat is sent.
        timeout_s: Limit of a request; a longer one counts as failed.
    """

    url: str
    ids: tuple[str, ...]
    bodies: tuple[tuple[str, ...], ...]
    num_at_once: int = 1
    num_requests: int | None = None
    duration_s: float | None = None
    arrivals_s: tuple[float, ...] | None = None
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Outcome:
    """Result of an order.

    Attributes:
        answers: One for each request that was sent, in the order sent.
        duration_s: From the first request to the end of the last answer.
    """

    answers: tuple[AnswerRecord, ...]
    duration_s: float

    @property
    def tokens_per_s(self) -> float:
        """Answered tokens a second, of all requests together."""
        return sum(one.record.num_output_tokens for one in self.answers) / self.duration_s


class CheckedReading(AnswerReading):
    """A reading that is particular: one finish reason, one usage, one `[DONE]`, and nothing after it.

    Attributes:
        text: The answer so far.
        token_ids: Its tokens so far, if the server sends them.
        hang_up_time: When its client hangs up; None waits for the end.
        on_progress: Called after every piece of the body.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.token_ids: list[int] = []
        self.hang_up_time: HangUpTime | None = None
        self.on_progress: Callable[[], None] = lambda: None
        self._faults: list[str] = []
        self._ids: set[str] = set()
        self._num_finishes = self._num_usages = self._num_done = 0
        self._num_counted: int | None = None

    def on_body(self, data: bytes, now_s: float) -> None:
        """The next bytes of the body."""
        super().on_body(data, now_s)
        self.on_progress()

    def on_event(self, event: bytes, now_s: float) -> None:
        """The next event."""
        if self._num_done:
            self._faults.append("an event after [DONE]")
        self._num_done += event == DONE
        super().on_event(event, now_s)

    def on_chunk(self, chunk: Chunk, fields: dict[str, Any], now_s: float) -> None:
        """The next chunk."""
        super().on_chunk(chunk, fields, now_s)
        if (chunk.text or chunk.token_ids) and self._num_finishes:
            self._faults.append("tokens after the finish reason")
        if "id" in fields:
            self._ids.add(str(fields["id"]))
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self._num_finishes += chunk.finish is not None
        if chunk.usage and not fields.get("choices"):
            self._num_usages += 1
            self._num_counted = chunk.usage.get("completion_tokens")

    def faults(self) -> tuple[str, ...]:
        """Violations by a stream that is complete as HTTP."""
        faults = list(self._faults)
        for what, count in (
            ("finish reason", self._num_finishes),
            ("usage", self._num_usages),
            ("[DONE]", self._num_done),
        ):
            if count != 1:
                faults.append(f"{what} came {count} times, not once")
        if len(self._ids) > 1:
            faults.append(f"chunks of {len(self._ids)} answers in one stream")
        if self.token_ids and self._num_counted is not None and len(self.token_ids) != self._num_counted:
            faults.append(f"{len(self.token_ids)} token ids came, usage counts {self._num_counted}")
        return tuple(faults)

    def answer(self, record: Record) -> AnswerRecord:
        """The request of this record with its answer; a failed request has no faults besides."""
        faults = self.faults() if record.failure is None else ()
        return AnswerRecord(record, self.text, tuple(self.token_ids), faults)


@dataclass(frozen=True)
class HangUpTime:
    """Moment at which a client closes its connection.

    Attributes:
        num_tokens: After so many tokens of the answer; 0 counts from the request's writing.
        after_s: So long after that, seconds.
    """

    num_tokens: int
    after_s: float


@dataclass(frozen=True)
class HangUps:
    """Clients that do not wait for the end.

    Attributes:
        share: Of requests, 0 to 1.
        seed: Seed of the random choices.
    """

    share: float
    seed: int


NO_HANG_UPS: Final = HangUps(0.0, 0)


async def ask_until(client: Client, path: str, body: bytes, reading: CheckedReading) -> Failure | None:
    """Send a request, and close the connection at the chosen moment unless the answer has ended before.

    Args:
        client: Client of the server.
        path: From `/v1` on.
        body: JSON.
        reading: Takes the answer; its `on_progress` is set.

    Returns:
        A failure of kind `hung_up` if the client left; otherwise what `Client.ask` returns.
    """
    hang_up_time = reading.hang_up_time
    if hang_up_time is None:
        return await client.ask(path, body, reading)
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal timer
        if timer is None and len(reading.token_ids) >= hang_up_time.num_tokens:
            timer = loop.call_later(hang_up_time.after_s, asking.cancel)

    reading.on_progress = look
    # Cancelled while it waits for the response, it aborts the connection.
    asking = loop.create_task(client.ask(path, body, reading, on_sent=look))
    try:
        await asyncio.wait([asking])
    finally:
        asking.cancel()
        if timer is not None:
            timer.cancel()
    if asking.cancelled():
        return Failure(HUNG_UP, "the client closed the connection as planned")
    return asking.result()


def draw_hang_up_time(
    random: Random, share: float, max_tokens: int, *, is_streamed: bool = True
) -> HangUpTime | None:
    """A moment for one request, or None if its client waits for the end.

    Times are drawn evenly over their orders of magnitude: what can go wrong within a millisecond and within a
    second is not the same.

    Args:
        random: Where it is drawn from; takes as many draws as it needs.
        share: Share of requests whose clients hang up, 0 to 1.
        max_tokens: Most tokens of the answer.
        is_streamed: Whether the client sees tokens arrive; otherwise only the time decides.
    """
    if random.random() >= share:
        return None
    kind = random.random()
    if kind < _AT_ONCE:
        return HangUpTime(0, 0.0)
    if not is_streamed:
        return HangUpTime(0, _over_magnitudes(random, _LEAST_S, _WHOLE_S))
    if kind < _AT_ONCE + _EARLY:
        return HangUpTime(0, _over_magnitudes(random, _LEAST_S, _EARLY_S))
    if kind < _AT_ONCE + _EARLY + _LATE:
        return HangUpTime(max_tokens, random.uniform(0.0, _END_S))
    return HangUpTime(random.randint(1, max_tokens), random.uniform(0.0, _BETWEEN_S))


def _over_magnitudes(random: Random, least: float, most: float) -> float:
    return float(least * (most / least) ** random.random())
