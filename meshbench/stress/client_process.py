"""Load client in a child process, on a host of the lab or here, and its handle.

Run as a program it takes one JSON order a line from standard input, and answers each with one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from mesh.util.completion_stream import CHAT_PATH, error_message
from meshbench.http_client import Client, parse_url
from meshbench.lab.line_process import LineProcess, answer_lines
from meshbench.load_generator import Job, Load
from meshbench.request_record import Failure, Heard
from meshbench.stress.answers import AnswerRecord, CheckedReading, Order, Outcome, ask_until
from meshbench.stress.scripts import ClientLoad, prompt_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshbench.lab.network import Lab
    from meshbench.request_record import AnswerReading, Record


class Turns:
    """An iterator over jobs: chats in their order, all over again from the first, turn after turn.

    A chat's next turn comes up once the one before it has ended, ahead of chats that have not begun.

    Args:
        ids: Of the chats.
        bodies: Of each chat, its requests.
        is_over: Called with the number of jobs given so far; returns whether there are no more.
    """

    def __init__(
        self, ids: Sequence[str], bodies: Sequence[Sequence[bytes]], is_over: Callable[[int], bool]
    ) -> None:
        self._ids = ids
        self._bodies = bodies
        self._is_over = is_over
        self._num_given = 0
        self._num_begun = 0
        self._ready: deque[tuple[int, int]] = deque()
        self._under_way: dict[int, tuple[int, int]] = {}

    def __iter__(self) -> Self:
        """Itself: its users share it."""
        return self

    def __next__(self) -> Job:
        """The next job; raises StopIteration when it is over."""
        if self._is_over(self._num_given):
            raise StopIteration
        if self._ready:
            chat, turn = self._ready.popleft()
        else:
            chat, turn = self._num_begun % len(self._ids), 0
            self._num_begun += 1
        number = self._num_given
        self._num_given += 1
        self._under_way[number] = chat, turn
        return Job(number, prompt_id(self._ids[chat], turn), self._bodies[chat][turn])

    def ended(self, record: Record) -> None:
        """A job is over, in whatever way."""
        chat, turn = self._under_way.pop(record.number)
        if turn + 1 < len(self._bodies[chat]):
            self._ready.append((chat, turn + 1))


class WholeReading(CheckedReading):
    """Takes an answer that comes in one piece, as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._body = b""

    def on_body(self, data: bytes, now_s: float) -> None:  # noqa: ARG002 - the protocol's
        """The next bytes of the body."""
        self._body += data

    def heard(self, failure: Failure | None = None) -> Heard:
        """The result; `text` and `token_ids` are known from then on."""
        if failure is not None:
            return Heard(failure=failure)
        if not self.has_begun:
            return Heard(failure=Failure(f"http_{self._status}", error_message(self._body)))
        try:
            fields: dict[str, Any] = json.loads(self._body)
            choice, usage = fields["choices"][0], fields["usage"]
            self.text, self.token_ids = choice["message"]["content"] or "", list(choice["token_ids"])
            return Heard(
                num_input_tokens=usage["prompt_tokens"],
                num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                num_output_tokens=usage["completion_tokens"],
                finish=choice["finish_reason"],
            )
        except (ValueError, LookupError, TypeError) as error:
            return Heard(failure=Failure("not_an_answer", f"the answer's JSON lacks something: {error!r}"))

    def faults(self) -> tuple[str, ...]:
        """None: JSON that ends too early is a failure."""
        return ()


class ClientPool:
    """Clients with an API key each; implements `load_generator.Asking`.

    Args:
        clients: One for each key.
        num_at_once: Most requests under way at once. They are spread evenly over the keys.
    """

    def __init__(self, clients: list[Client], num_at_once: int) -> None:
        self._free = [clients[place % len(clients)] for place in range(num_at_once)]

    async def ask(self, path: str, body: bytes, reading: AnswerReading) -> Failure | None:
        """Send one request from a client that has none under way."""
        assert isinstance(reading, CheckedReading)  # noqa: S101 - made by `run_client_load`
        client = self._free.pop(0)
        try:
            return await ask_until(client, path, body, reading)
        finally:
            self._free.append(client)


class LoadClient(LineProcess):
    """Client on a lab host or on this machine; a context manager.

    Args:
        lab: Where; None is this machine, outside of any lab.
        host: Index of the lab's host.
        api_key: API key of every request of an `Order`; None if the server needs none.
    """

    def __init__(self, lab: Lab | None, host: int = 0, *, api_key: str | None = None) -> None:
        super().__init__(lab, host, "meshbench.stress.client_process")
        self._api_key = api_key

    def ask(self, order: Order) -> Outcome:
        """Have an order carried out; failures of requests are part of the outcome.

        Raises:
            MeshError: If the process ended.
        """
        return self._have({"order": asdict(order), "api_key": self._api_key})

    def run_clients(self, load: ClientLoad) -> Outcome:
        """Send requests of several clients, some of which hang up.

        Raises:
            MeshError: If the process ended.
        """
        return self._have({"visit_order": asdict(load)})

    def _have(self, wanted: dict[str, Any]) -> Outcome:
        fields = self.exchange(wanted)
        return Outcome(tuple(map(AnswerRecord.from_dict, fields["told"])), fields["duration_s"])


async def run_client_load(order: ClientLoad) -> Outcome:
    """Send the ordered requests from this process."""
    server = parse_url(order.url)
    clients = [
        Client(server, api_key=key, timeout_s=order.timeout_s, clock_s=time.perf_counter)
        for key in order.api_keys
    ]
    readings: dict[int, CheckedReading] = {}
    answers: list[AnswerRecord] = []

    def make_reading(job: Job) -> CheckedReading:
        request = order.visits[job.number]
        reading = CheckedReading() if request.is_streamed else WholeReading()
        readings[job.number] = reading
        reading.hang_up_time = request.moment
        return reading

    def on_end(record: Record) -> None:
        answers.append(readings.pop(record.number).answer(record))

    jobs = [
        Job(
            number,
            prompt_id(order.ids[request.request], 0),
            order.bodies[request.request][0 if request.is_streamed else 1].encode(),
        )
        for number, request in enumerate(order.visits)
    ]
    pool = ClientPool(clients, order.num_at_once)
    load = Load(pool, CHAT_PATH, time.perf_counter, on_end, make_reading)
    try:
        await load.closed_loop(jobs, order.num_at_once)
    finally:
        for client in clients:
            client.close()
    return Outcome(tuple(sorted(answers, key=lambda one: one.record.number)), load.now_s())


async def carry_out(order: Order, api_key: str | None = None) -> Outcome:
    """Send the ordered requests from this process."""
    client = Client(
        parse_url(order.url),
        api_key=api_key,
        timeout_s=order.timeout_s,
        clock_s=time.perf_counter,
    )
    readings: dict[int, CheckedReading] = {}
    answers: list[AnswerRecord] = []

    def make_reading(job: Job) -> CheckedReading:
        readings[job.number] = CheckedReading()
        return readings[job.number]

    def on_end(record: Record) -> None:
        answers.append(readings.pop(record.number).answer(record))
        turns.ended(record)

    def is_over(num_given: int) -> bool:
        is_late = order.duration_s is not None and load.now_s() >= order.duration_s
        return is_late or (order.num_requests is not None and num_given >= order.num_requests)

    bodies = [[body.encode() for body in chat] for chat in order.bodies]
    turns = Turns(order.ids, bodies, is_over)
    load = Load(client, CHAT_PATH, time.perf_counter, on_end, make_reading)
    try:
        if order.arrivals_s is None:
            await load.closed_loop(turns, order.num_at_once)
        else:
            await load.open_loop(list(turns), order.arrivals_s, None)
    finally:
        client.close()
    duration_s = load.now_s()
    return Outcome(tuple(sorted(answers, key=lambda one: one.record.number)), duration_s)


def _order(fields: dict[str, Any]) -> Order:
    """Restores tuples after JSON."""
    arrivals_s = fields["arrivals_s"]
    return Order(
        **{
            **fields,
            "ids": tuple(fields["ids"]),
            "bodies": tuple(map(tuple, fields["bodies"])),
            "arrivals_s": None if arrivals_s is None else tuple(arrivals_s),
        }
    )


def _outcome(wanted: dict[str, Any]) -> dict[str, Any]:
    if "visit_order" in wanted:
        outcome = asyncio.run(run_client_load(ClientLoad.from_dict(wanted["visit_order"])))
    else:
        outcome = asyncio.run(carry_out(_order(wanted["order"]), wanted["api_key"]))
    return {"told": [one.as_dict() for one in outcome.answers], "duration_s": outcome.duration_s}


if __name__ == "__main__":
    answer_lines(_outcome)
