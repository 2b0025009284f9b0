"""Child process of the load client.

Takes commands as JSON, one a line, from standard input, and writes results to standard output; every line has
the command's number. See `meshbench.load_client.client`, its user.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import sys
import time
from collections import deque
from dataclasses import asdict
from random import Random
from typing import TYPE_CHECKING, Any, Final, Self

from meshbench.http_client import Client, WholeBody, parse_url
from meshbench.lab.line_process import write_line
from meshbench.load_client.answers import Outcome
from meshbench.load_client.hang_ups import draw_hang_up_time
from meshbench.load_client.json_values import restored
from meshbench.load_client.reading import CheckedReading, WholeReading
from meshbench.load_client.schedule import Schedule
from meshbench.load_generator import Job, Load
from meshbench.request_record import HUNG_UP, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from meshbench.load_client.answers import AnswerRecord
    from meshbench.load_client.schedule import Request
    from meshbench.request_record import AnswerReading, Record

# A client that is asked to come again does, but not after a long wait.
_MOST_PATIENCE_S: Final = 3.0
_LEAST_PATIENCE_S: Final = 0.2
_STATUS_TIMEOUT_S: Final = 4.0
# Of a line: bodies of all requests.
_MAX_LINE_BYTES: Final = 2**30


class Turns:
    """An iterator over jobs: chats in their order, all over again from the first, turn after turn.

    A chat's next turn comes up once the one before it has ended, ahead of chats that have not begun.

    Args:
        chats: Requests of each.
        is_over: Called with the number of jobs given so far; returns whether there are no more.
    """

    def __init__(self, chats: Sequence[Sequence[Request]], is_over: Callable[[int], bool]) -> None:
        self._chats = itertools.cycle(chats)
        self._is_over = is_over
        self._num_given = 0
        # Requests that are left of chats, the next one first.
        self._ready: deque[Sequence[Request]] = deque()
        self._under_way: dict[int, Sequence[Request]] = {}

    def __iter__(self) -> Self:
        """Itself: its users share it."""
        return self

    def __next__(self) -> Job:
        """The next job; raises StopIteration when it is over."""
        if self._is_over(self._num_given):
            raise StopIteration
        rest = self._ready.popleft() if self._ready else next(self._chats)
        number = self._num_given
        self._num_given += 1
        self._under_way[number] = rest
        return Job(number, rest[0].id, rest[0].path, rest[0].body.encode())

    def request(self, job: Job) -> Request:
        """The request of a job that has not ended."""
        return self._under_way[job.number][0]

    def ended(self, record: Record) -> None:
        """A job is over, in whatever way."""
        if rest := self._under_way.pop(record.number)[1:]:
            self._ready.append(rest)


class Run:
    """A schedule, carried out from this process.

    Args:
        schedule: The schedule.
        on_end: Called with each answer, at its end.
    """

    def __init__(self, schedule: Schedule, on_end: Callable[[AnswerRecord], None]) -> None:
        self._schedule = schedule
        self._on_end = on_end
        self._clients = [_client(schedule.url, schedule.timeout_s, key) for key in schedule.api_keys]
        num_places = max(schedule.num_at_once, len(schedule.arrivals_s or ()))
        self._free = [self._clients[place % len(self._clients)] for place in range(num_places)]
        self._turns = Turns(schedule.chats, self._is_over)
        self._random = Random(schedule.hang_ups.seed)  # noqa: S311 - a load, not a secret
        self._readings: dict[int, tuple[float, CheckedReading]] = {}
        self._is_ending = False
        self._load = Load(self, time.perf_counter, self._ended, self._make_reading, zero_s=0.0)

    async def carry_out(self) -> float:
        """Send all requests; returns how long it took, in seconds."""
        schedule = self._schedule
        try:
            if schedule.arrivals_s is None:
                await self._load.closed_loop(
                    self._turns, schedule.num_at_once, _patience_s if schedule.is_patient else None
                )
            else:
                await self._load.open_loop(list(self._turns), schedule.arrivals_s, None)
        finally:
            for client in self._clients:
                client.close()
        return self._load.now_s()

    def end(self) -> None:
        """Send no more; running requests continue to their end."""
        self._is_ending = True

    def running(self) -> list[dict[str, float | None]]:
        """Fields of `client.RunningRequest`, for each request under way."""
        return [
            {"sent_s": sent_s, "last_s": reading.last_part_s} for sent_s, reading in self._readings.values()
        ]

    async def ask(self, path: str, body: bytes, reading: AnswerReading) -> Failure | None:
        """Send one request from a client that has none under way; implements `load_generator.Asking`."""
        assert isinstance(reading, CheckedReading)  # noqa: S101 - made below
        client = self._free.pop(0)
        try:
            return await ask_until(client, path, body, reading)
        finally:
            self._free.append(client)

    def _is_over(self, num_given: int) -> bool:
        schedule = self._schedule
        is_late = schedule.duration_s is not None and self._load.now_s() >= schedule.duration_s
        is_all = schedule.num_requests is not None and num_given >= schedule.num_requests
        return self._is_ending or is_late or is_all

    def _make_reading(self, job: Job) -> CheckedReading:
        request, hang_ups = self._turns.request(job), self._schedule.hang_ups
        reading = CheckedReading() if request.is_streamed else WholeReading()
        reading.hang_up_time = request.hang_up_time
        if hang_ups.share:
            max_tokens = json.loads(request.body)["max_tokens"]
            reading.hang_up_time = draw_hang_up_time(self._random, hang_ups.share, max_tokens)
        self._readings[job.number] = time.perf_counter(), reading
        return reading

    def _ended(self, record: Record) -> None:
        self._turns.ended(record)
        _sent_s, reading = self._readings.pop(record.number)
        self._on_end(reading.answer(record))


class _Process:
    """Carries out commands, several at once."""

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}

    async def serve(self) -> None:
        """Until standard input ends, which breaks running requests off."""
        lines = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        async with asyncio.TaskGroup() as group:
            while line := await lines.readline():
                command = json.loads(line)
                match command["do"]:
                    case "run" | "start":
                        group.create_task(self._begin(**command))
                    case "end" if command["number"] in self._runs:
                        self._runs[command["number"]].end()
                    case "snapshot":
                        group.create_task(self._snapshot(command["number"], command["url"]))
            raise SystemExit

    def _begin(self, number: int, do: str, schedule: dict[str, Any]) -> Coroutine[None, None, None]:
        answers: list[AnswerRecord] = []

        def report(answer: AnswerRecord) -> None:
            write_line({"number": number, "answer": asdict(answer)})

        # Only what runs in the background is reported meanwhile: that takes time from running requests.
        run = Run(restored(Schedule, schedule), report if do == "start" else answers.append)
        self._runs[number] = run
        return self._finish(number, run, answers)

    async def _finish(self, number: int, run: Run, answers: list[AnswerRecord]) -> None:
        duration_s = await run.carry_out()
        del self._runs[number]
        write_line({"number": number, "outcome": asdict(_outcome(answers, duration_s))})

    async def _snapshot(self, number: int, url: str) -> None:
        status = await _status(url)
        running = [each for run in self._runs.values() for each in run.running()]
        snapshot = {"at_s": time.perf_counter(), "status": status, "running": running}
        write_line({"number": number, "snapshot": snapshot})


async def send(schedule: Schedule) -> Outcome:
    """Carry out a schedule from this process."""
    answers: list[AnswerRecord] = []
    return _outcome(answers, await Run(schedule, answers.append).carry_out())


def _outcome(answers: list[AnswerRecord], duration_s: float) -> Outcome:
    return Outcome(tuple(sorted(answers, key=lambda one: one.record.number)), duration_s)


async def ask_until(client: Client, path: str, body: bytes, reading: CheckedReading) -> Failure | None:
    """Send a request, and close the connection at the chosen moment unless the answer has ended before.

    Args:
        client: Client of the server.
        path: From `/v1` on.
        body: JSON.
        reading: Takes the answer; its `on_progress` is set.

    Returns:
        A failure of kind `hung_up` if the client hung up; otherwise what `Client.ask` returns.
    """
    hang_up_time = reading.hang_up_time
    if hang_up_time is None:
        return await client.ask(path, body, reading)
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def check() -> None:
        nonlocal timer
        if timer is None and len(reading.token_ids) >= hang_up_time.num_tokens:
            timer = loop.call_later(hang_up_time.after_s, asking.cancel)

    reading.on_progress = check
    # Cancelled while it waits for the response, it aborts the connection.
    asking = loop.create_task(client.ask(path, body, reading, on_sent=check))
    try:
        await asyncio.wait([asking])
    finally:
        asking.cancel()
        if timer is not None:
            timer.cancel()
    if asking.cancelled():
        return Failure(HUNG_UP, "the client closed the connection as planned")
    return asking.result()


async def _status(url: str) -> dict[str, Any] | None:
    """Body of `/mesh/status`; None without a good answer."""
    answer = WholeBody()
    try:
        await _status_client(url).exchange("GET", "/mesh/status", b"", answer)
        found: dict[str, Any] = json.loads(answer.body)
    except (TimeoutError, OSError, ValueError):
        return None
    return found if answer.status == 200 else None


@functools.cache
def _status_client(url: str) -> Client:
    return _client(url, _STATUS_TIMEOUT_S)


def _client(url: str, timeout_s: float, api_key: str | None = None) -> Client:
    return Client(parse_url(url), api_key=api_key, timeout_s=timeout_s, clock_s=time.perf_counter)


def _patience_s(record: Record) -> float:
    """Pause of a client whose request failed, in seconds; one that hung up sends the next at once."""
    failure = record.failure
    if failure is None or failure.is_hang_up:
        return 0.0
    try:
        wanted_s = float(failure.retry_after or 0.0)
    except ValueError:
        wanted_s = 0.0
    return min(_MOST_PATIENCE_S, max(_LEAST_PATIENCE_S, wanted_s))


if __name__ == "__main__":
    asyncio.run(_Process().serve())
