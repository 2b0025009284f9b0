"""Carries out a load of clients with several API keys, of whom some hang up."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from mesh.bench.serve.client import Client
from mesh.bench.serve.endpoint import parse_url
from mesh.bench.serve.load import Job, Load
from mesh.bench.serve.reading import error_message
from mesh.bench.serve.record import Failure, Heard
from mesh.bench.stream_client import CHAT_PATH
from mesh.bench.stress.checked_reading import CheckedReading
from mesh.bench.stress.hanging_up import ask_until
from mesh.bench.stress.order import Outcome
from mesh.bench.stress.script import prompt_id
from mesh.bench.stress.told import Told

if TYPE_CHECKING:
    from mesh.bench.serve.reading import AnswerReading
    from mesh.bench.serve.record import Record
    from mesh.bench.stress.visits import VisitOrder


class WholeReading(CheckedReading):
    """Takes an answer that comes in one piece, as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._body = b""

    def on_body(self, data: bytes, now_s: float) -> None:  # noqa: ARG002 - the protocol's
        """The next bytes of the body."""
        self._body += data

    def heard(self, failure: Failure | None = None) -> Heard:
        """What came; `text` and `token_ids` are known from then on."""
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


class Visitors:
    """Clients of whom each has an API key; implements `load.Asking`.

    Args:
        clients: One for each key.
        num_at_once: Most requests under way at once. They are spread evenly over the keys.
    """

    def __init__(self, clients: list[Client], num_at_once: int) -> None:
        self._free = [clients[place % len(clients)] for place in range(num_at_once)]

    async def ask(self, path: str, body: bytes, reading: AnswerReading) -> Failure | None:
        """Send one request from a client that has none under way."""
        assert isinstance(reading, CheckedReading)  # noqa: S101 - made by `carry_out_visits`
        client = self._free.pop(0)
        try:
            return await ask_until(client, path, body, reading)
        finally:
            self._free.append(client)


async def carry_out_visits(order: VisitOrder) -> Outcome:
    """Send what is ordered from this process."""
    server = parse_url(f"http://127.0.0.1:{order.port}")
    clients = [
        Client(server, api_key=key, timeout_s=order.timeout_s, clock_s=time.perf_counter)
        for key in order.api_keys
    ]
    readings: dict[int, CheckedReading] = {}
    told: list[Told] = []

    def make_reading(job: Job) -> CheckedReading:
        visit = order.visits[job.number]
        reading = CheckedReading() if visit.is_streamed else WholeReading()
        readings[job.number] = reading
        reading.moment = visit.moment
        return reading

    def on_end(record: Record) -> None:
        reading = readings.pop(record.number)
        faults = reading.faults() if record.failure is None else ()
        told.append(Told(record, reading.text, tuple(reading.token_ids), faults))

    jobs = [
        Job(
            number,
            prompt_id(order.ids[visit.request], 0),
            order.bodies[visit.request][0 if visit.is_streamed else 1].encode(),
        )
        for number, visit in enumerate(order.visits)
    ]
    visitors = Visitors(clients, order.num_at_once)
    load = Load(visitors, CHAT_PATH, time.perf_counter, on_end, make_reading)
    try:
        await load.closed_loop(jobs, order.num_at_once)
    finally:
        for client in clients:
            client.close()
    return Outcome(tuple(sorted(told, key=lambda one: one.record.number)), load.now_s())
