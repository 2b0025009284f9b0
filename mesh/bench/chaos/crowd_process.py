"""The process of the clients, on the head's own host: `python -m mesh.bench.chaos.crowd_process PORT`.

It takes one JSON object a line from standard input and writes others to standard output, in the order in
which things happen; see `mesh.bench.chaos.crowd`, which talks to it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from mesh.bench.chaos.clients import Clients
from mesh.bench.http_client import Client, parse_url
from mesh.bench.stress.answers import HangUps

if TYPE_CHECKING:
    from mesh.bench.chaos.stream import Stream

# A stream that a repair does not bring back within this has failed.
_ANSWER_TIMEOUT_S: Final = 180.0
_STATUS_TIMEOUT_S: Final = 4.0


def _say(what: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"what": what, **fields}) + "\n")
    sys.stdout.flush()


def _tell_of(stream: Stream) -> None:
    _say("stream", stream=stream.as_dict())


def _client(port: int, timeout_s: float) -> Client:
    server = parse_url(f"http://127.0.0.1:{port}")
    return Client(server, api_key=None, timeout_s=timeout_s, clock_s=time.perf_counter)


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


if __name__ == "__main__":
    asyncio.run(_Process(int(sys.argv[1])).serve_lines())
