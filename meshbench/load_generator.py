"""Load generator: open and closed loops."""

from __future__ import annotations

import asyncio
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from meshbench.request_record import UNFINISHED, AnswerReading, Failure, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager


@dataclass(frozen=True)
class Job:
    """A request, ready to go."""

    number: int
    """From 0, in the order of the schedule."""
    prompt_id: str
    """Id of the prompt."""
    path: str
    """From `/v1` on."""
    body: bytes
    """JSON."""


class Asking(Protocol):
    """Sends requests; `http_client.Client` does."""

    async def ask(self, path: str, body: bytes, reading: AnswerReading) -> Failure | None:
        """Send one and read its answer; returns why there is none, unless it is the server's doing."""


class Load:
    """Sends jobs and notes what becomes of each, also of those under way when it is cancelled.

    Args:
        client: Sends them.
        clock_s: Monotonic, seconds; the client's.
        on_end: Called after each.
        make_reading: Makes what takes a job's answer.
        zero_s: Reading of the clock from which records count their times; None is the start of the loop.
    """

    def __init__(
        self,
        client: Asking,
        clock_s: Callable[[], float],
        on_end: Callable[[Record], None],
        make_reading: Callable[[Job], AnswerReading] = lambda _job: AnswerReading(),
        zero_s: float | None = None,
    ) -> None:
        self._client = client
        self._clock_s = clock_s
        self._on_end = on_end
        self._make_reading = make_reading
        self._zero_s = zero_s
        self._start_s = clock_s()

    def now_s(self) -> float:
        """Seconds since the load began."""
        return self._clock_s() - self._start_s

    async def closed_loop(
        self, jobs: Iterable[Job], num_at_once: int, pause_s: Callable[[Record], float] | None = None
    ) -> None:
        """Keep so many requests under way: the next is sent when one ends, however it ends.

        A slow server gets fewer requests, so a closed loop measures the server's capacity, not the users'
        waiting time.

        Args:
            jobs: In this order.
            num_at_once: At least 1.
            pause_s: How long a user waits after a request, in seconds; None for not at all.
        """
        self._start_s = self._clock_s()
        waiting = iter(jobs)

        async def user() -> None:
            for job in waiting:
                now_s = self.now_s()
                record = await self._one(job, now_s, now_s)
                if pause_s is not None and (wait_s := pause_s(record)) > 0:
                    await asyncio.sleep(wait_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(user())

    async def open_loop(
        self, jobs: Sequence[Job], arrivals_s: Sequence[float], num_at_once: int | None
    ) -> None:
        """Send each request at its time, whatever became of those before it.

        Args:
            jobs: In this order.
            arrivals_s: When each is to be sent, from the start.
            num_at_once: Requests that may be under way; those that are due wait in line. None sets no limit.
        """
        self._start_s = self._clock_s()
        place: AbstractAsyncContextManager[object] = (
            nullcontext() if num_at_once is None else asyncio.Semaphore(num_at_once)
        )

        async def arrive(job: Job, scheduled_s: float) -> None:
            # A request that finds a free place was ready when due: its delay is this client's.
            waits = isinstance(place, asyncio.Semaphore) and place.locked()
            async with place:
                await self._one(job, scheduled_s, self.now_s() if waits else scheduled_s)

        async with asyncio.TaskGroup() as group:
            for job, scheduled_s in zip(jobs, arrivals_s, strict=True):
                # Timers count whole milliseconds, and may be early by half of one.
                while (wait_s := scheduled_s - self.now_s()) > 0:  # noqa: ASYNC110 - a time, not a state
                    await asyncio.sleep(wait_s)
                group.create_task(arrive(job, scheduled_s))

    async def _one(self, job: Job, scheduled_s: float, ready_s: float) -> Record:
        reading = self._make_reading(job)
        failure: Failure | None = Failure(UNFINISHED, "the run ended first")
        sent_s = self.now_s()
        try:
            failure = await self._client.ask(job.path, job.body, reading)
        finally:
            zero_s = self._start_s if self._zero_s is None else self._zero_s
            # Start of the loop, from which its times count.
            begun_s = self._start_s - zero_s
            scheduled_s, ready_s, ended_s = scheduled_s + begun_s, ready_s + begun_s, self.now_s() + begun_s
            record = Record(job.number, job.prompt_id, scheduled_s, ready_s, sent_s + begun_s, ended_s)
            record = record.with_answer(reading.response(failure), zero_s)
            self._on_end(record)
        return record


def arrival_times_s(count: int, rate: float, burstiness: float, seed: int) -> tuple[float, ...]:
    """Times of arrival, in seconds from the start, ascending.

    The gaps are drawn from a gamma distribution with shape `burstiness`: 1 makes a Poisson process, less
    makes bursts, more makes the load even, infinity makes it constant. They are then stretched so that all
    requests arrive within `count / rate` seconds, whatever the seed. Both as in vLLM's `bench serve`.

    Args:
        count: Requests.
        rate: Requests a second; infinity lets all arrive at once.
        burstiness: Above 0.
        seed: The same seed, the same times.
    """
    if math.isinf(rate):
        return (0.0,) * count
    if math.isinf(burstiness):
        gaps = np.ones(count)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, size=count)
    times = np.cumsum(gaps)
    # So bursty a load that every gap is too small for a float comes at once, at the end of its time.
    shares = times / times[-1] if times[-1] > 0 else np.ones(count)
    return tuple((shares * (count / rate)).tolist())
