"""The asking side: a process on the servers' own host, kept for the whole run.

Run as a program it takes one JSON order a line from standard input, and answers each with one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from mesh.bench.serve.client import Client
from mesh.bench.serve.endpoint import parse_url
from mesh.bench.serve.load import Job, Load
from mesh.bench.stream_client import CHAT_PATH
from mesh.bench.stress.checked_reading import CheckedReading
from mesh.bench.stress.order import Order, Outcome
from mesh.bench.stress.told import Told
from mesh.bench.stress.turns import Turns
from mesh.bench.stress.visiting import carry_out_visits
from mesh.bench.stress.visits import VisitOrder
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from types import TracebackType

    from mesh.bench.serve.record import Record
    from mesh.lab.network import Lab


class Asker:
    """Asks from a lab host; a context manager.

    Args:
        lab: Where.
        host: Its number; servers are asked over this host's loopback.
        api_key: Goes with every request of an `Order`; None if the server wants none.
    """

    def __init__(self, lab: Lab, host: int = 0, *, api_key: str | None = None) -> None:
        self._lab = lab
        self._host = host
        self._api_key = api_key
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        """Start the process."""
        argv = [sys.executable, "-m", "mesh.bench.stress.asker"]
        self._process = self._lab.run(self._host, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it: what is under way breaks off."""
        self._process.kill()
        self._process.wait()

    def ask(self, order: Order) -> Outcome:
        """Have an order carried out; failures of requests are part of the outcome.

        Raises:
            MeshError: If the process ended.
        """
        return self._have({"order": asdict(order), "api_key": self._api_key})

    def visit(self, order: VisitOrder) -> Outcome:
        """Have several clients ask, of whom some hang up.

        Raises:
            MeshError: If the process ended.
        """
        return self._have({"visit_order": asdict(order)})

    def _have(self, wanted: dict[str, Any]) -> Outcome:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # noqa: S101 - both are pipes, see above
        assert stdout is not None  # noqa: S101
        stdin.write(json.dumps(wanted).encode() + b"\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise MeshError(f"the asking process ended with code {self._process.wait()}")
        fields = json.loads(line)
        return Outcome(tuple(map(Told.from_dict, fields["told"])), fields["duration_s"])


async def carry_out(order: Order, api_key: str | None = None) -> Outcome:
    """Send what is ordered from this process."""
    client = Client(
        parse_url(f"http://127.0.0.1:{order.port}"),
        api_key=api_key,
        timeout_s=order.timeout_s,
        clock_s=time.perf_counter,
    )
    readings: dict[int, CheckedReading] = {}
    told: list[Told] = []

    def make_reading(job: Job) -> CheckedReading:
        readings[job.number] = CheckedReading()
        return readings[job.number]

    def on_end(record: Record) -> None:
        reading = readings.pop(record.number)
        faults = reading.faults() if record.failure is None else ()
        told.append(Told(record, reading.text, tuple(reading.token_ids), faults))
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
    return Outcome(tuple(sorted(told, key=lambda one: one.record.number)), duration_s)


def _order(fields: dict[str, Any]) -> Order:
    """JSON knows no tuples."""
    arrivals_s = fields["arrivals_s"]
    return Order(
        **{
            **fields,
            "ids": tuple(fields["ids"]),
            "bodies": tuple(map(tuple, fields["bodies"])),
            "arrivals_s": None if arrivals_s is None else tuple(arrivals_s),
        }
    )


def _serve_lines() -> None:
    for line in sys.stdin:
        wanted = json.loads(line)
        if "visit_order" in wanted:
            outcome = asyncio.run(carry_out_visits(VisitOrder.from_dict(wanted["visit_order"])))
        else:
            outcome = asyncio.run(carry_out(_order(wanted["order"]), wanted["api_key"]))
        fields = {"told": [one.as_dict() for one in outcome.told], "duration_s": outcome.duration_s}
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve_lines()
