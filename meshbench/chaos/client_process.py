"""Child process with the clients.

Takes one JSON object a line from standard input and writes others to standard output, in the order of events;
see `meshbench.chaos.clients`, its user.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from dataclasses import asdict
from random import Random
from typing import TYPE_CHECKING, Any, Final

from mesh.util.completion_stream import CHAT_PATH
from meshbench.chaos.clients import Running, Stream
from meshbench.http_client import Client, WholeBody, parse_url
from meshbench.lab.line_process import write_line
from meshbench.request_record import Record
from meshbench.stress.answers import (
    NO_HANG_UPS,
    CheckedReading,
    HangUps,
    ask_until,
    draw_hang_up_time,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from meshbench.request_record import Failure
    from meshbench.stress.answers import HangUpTime

# A client that is told to come again does, but not after a long wait.
_MOST_PATIENCE_S: Final = 3.0
_LEAST_PATIENCE_S: Final = 0.2
# A stream that a repair does not bring back within this has failed.
_ANSWER_TIMEOUT_S: Final = 180.0
_STATUS_TIMEOUT_S: Final = 4.0


class WatchedReading(CheckedReading):
    """See `CheckedReading`.

    Attributes:
        bytes_s: Arrival of any bytes, comment pings included, by the client's clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_s: list[float] = []

    def on_body(self, data: bytes, now_s: float) -> None:
        """The next bytes of the body."""
        self.bytes_s.append(now_s)
        super().on_body(data, now_s)


class Clients:
    """Sends requests, and records the arrival of each token.

    Args:
        client: Sends requests.
        clock_s: Monotonic, seconds; the client's.
        on_end: Called with each request that is over.
    """

    def __init__(
        self, client: Client, clock_s: Callable[[], float], on_end: Callable[[Stream], None]
    ) -> None:
        self._client = client
        self._clock_s = clock_s
        self._on_end = on_end
        self._under_way: dict[int, tuple[float, WatchedReading]] = {}
        self._numbers = itertools.count()
        self._is_closing = False

    async def ask_all(self, questions: Sequence[tuple[str, str]], num_at_once: int) -> None:
        """Send each question once, this many at once.

        Args:
            questions: Name and body of each.
            num_at_once: At least 1.
        """
        await self._work_off(iter(questions), num_at_once)

    async def keep_asking(
        self, questions: Sequence[tuple[str, str]], num_at_once: int, hang_ups: HangUps
    ) -> None:
        """Send questions over and over, this many at once, until `let_end`.

        Args:
            questions: Name and body of each.
            num_at_once: At least 1.
            hang_ups: Clients that hang up, and when; they send the next question at once.
        """
        self._is_closing = False
        await self._work_off(self._until_closing(questions), num_at_once, hang_ups)

    def let_end(self) -> None:
        """Send no more; running requests continue to their end."""
        self._is_closing = True

    async def ask(self, name: str, body: str, hang_up_time: HangUpTime | None = None) -> Stream:
        """Send a question, and hang up at the moment; None waits for the end."""
        reading = WatchedReading()
        reading.hang_up_time = hang_up_time
        number = next(self._numbers)
        sent_s = self._clock_s()
        self._under_way[number] = sent_s, reading
        try:
            failure = await ask_until(self._client, CHAT_PATH, body.encode(), reading)
        finally:
            del self._under_way[number]
        record = Record(number, name, sent_s, sent_s, sent_s, ended_s=self._clock_s())
        answer = reading.answer(record.with_answer(reading.heard(failure)))
        return Stream(answer, tuple(reading.bytes_s))

    def running(self) -> tuple[Running, ...]:
        """Streams in progress."""
        found = []
        for sent_s, reading in self._under_way.values():
            parts_s = reading.heard().parts_s
            found.append(Running(sent_s, parts_s[-1] if parts_s else None))
        return tuple(found)

    async def status(self) -> dict[str, Any] | None:
        """Body of `/mesh/status`; None without a good answer."""
        answer = WholeBody()
        try:
            await self._client.exchange("GET", "/mesh/status", b"", answer)
            found: dict[str, Any] = json.loads(answer.body)
        except (TimeoutError, OSError, ValueError):
            return None
        return found if answer.status == 200 else None

    async def _work_off(
        self, questions: Iterator[tuple[str, str]], num_at_once: int, hang_ups: HangUps = NO_HANG_UPS
    ) -> None:
        random = Random(hang_ups.seed)  # noqa: S311 - a load, not a secret

        async def user() -> None:
            for name, body in questions:
                hang_up_time = draw_hang_up_time(random, hang_ups.share, json.loads(body)["max_tokens"])
                stream = await self.ask(name, body, hang_up_time)
                self._on_end(stream)
                failure = stream.answer.record.failure
                if failure is not None and not failure.is_hang_up:
                    await asyncio.sleep(_patience_s(failure))

        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(user())

    def _until_closing(self, questions: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        for question in itertools.cycle(questions):
            if self._is_closing:
                return
            yield question


class _Process:
    def __init__(self, port: int) -> None:
        self._clients = Clients(_client(port, _ANSWER_TIMEOUT_S), time.perf_counter, _tell_of)
        self._onlooker = Clients(_client(port, _STATUS_TIMEOUT_S), time.perf_counter, _tell_of)
        self._works: set[asyncio.Task[None]] = set()

    async def serve_lines(self) -> None:
        lines = asyncio.StreamReader(limit=2**24)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            order = json.loads(line)
            if order["do"] == "let_end":
                self._clients.let_end()
                continue
            work = asyncio.create_task(self._work(order))
            self._works.add(work)
            work.add_done_callback(self._works.discard)

    async def _work(self, order: dict[str, Any]) -> None:
        clients = self._clients
        match order["do"]:
            case "ask_all":
                await clients.ask_all(order["questions"], order["num_at_once"])
                _say("asked")
            case "keep_asking":
                hang_ups = HangUps(**order["hang_ups"])
                await clients.keep_asking(order["questions"], order["num_at_once"], hang_ups)
                _say("asked")
            case "probe":
                stream = await self._clients.ask(*order["question"])
                _say("probe", number=order["number"], stream=stream.as_dict())
            case "look":
                status = await self._onlooker.status()
                running = [asdict(each) for each in clients.running()]
                _say("look", look={"at_s": time.perf_counter(), "status": status, "running": running})


def _patience_s(failure: Failure) -> float:
    """Pause before the next request, in seconds."""
    try:
        told_s = float(failure.retry_after or 0.0)
    except ValueError:
        told_s = 0.0
    return min(_MOST_PATIENCE_S, max(_LEAST_PATIENCE_S, told_s))


def _say(what: str, **fields: Any) -> None:
    write_line({"what": what, **fields})


def _tell_of(stream: Stream) -> None:
    _say("stream", stream=stream.as_dict())


def _client(port: int, timeout_s: float) -> Client:
    server = parse_url(f"http://127.0.0.1:{port}")
    return Client(server, api_key=None, timeout_s=timeout_s, clock_s=time.perf_counter)


if __name__ == "__main__":
    asyncio.run(_Process(int(sys.argv[1])).serve_lines())
