"""Watch on a head under attack: its event loop, its processes, and the pace of other clients."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import psutil

from mesh.util.completion_stream import COMPLETION_PATH
from meshbench.http_client import Client, WholeBody, parse_url
from meshbench.lab.memory_watch import role_of
from meshbench.load_generator import Job, Load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from meshbench.lab.local_mesh import ServedMesh
    from meshbench.request_record import Record

_PROBE_S: Final = 0.1
_LOOK_S: Final = 0.5
# Of one processor: pings, health checks and clocks take some percent.
_IDLE_SHARE: Final = 0.2
_TIMEOUT_S: Final = 300.0
_DRAIN_S: Final = 60.0
_OK: Final = 200
_ALLOWED_COUNT: Final = 16
_ALLOWED_BYTES: Final = 128 * 2**20


@dataclass(frozen=True)
class Footprint:
    """What the processes of a mesh on this host hold, Ray's own left out."""

    num_processes: int
    """`mesh serve` and its children."""
    num_threads: int
    """Of all of them."""
    num_files: int
    """Open files and sockets of all of them."""
    size_bytes: int
    """Their memory; pages that several share count once."""
    busy_s: float
    """Processor time that they have used so far."""

    def excess_over(self, rest: Footprint) -> str | None:
        """What is left of an attack, in words; None if nothing is.

        Threads of a pool, idle connections and what an allocator keeps are none: 16 threads, 16 files and
        128 MiB.

        Args:
            rest: The footprint before.
        """
        counts = (
            ("processes", self.num_processes, rest.num_processes, 0),
            ("threads", self.num_threads, rest.num_threads, _ALLOWED_COUNT),
            ("open files", self.num_files, rest.num_files, _ALLOWED_COUNT),
            ("bytes of memory", self.size_bytes, rest.size_bytes, _ALLOWED_BYTES),
        )
        found = [
            f"{now} {name} where {then} were" for name, now, then, allowed in counts if now > then + allowed
        ]
        return ", ".join(found) or None


class HeadWatch:
    """Asks for `/health`, streams as another client, and looks at the footprint, during the block.

    Args:
        mesh: The mesh.
        key: API key of the other client.
        num_streams: Its streams at once; 0 for none.
        num_tokens: Tokens of each.
        on_still: Called with the milliseconds that an answer of `/health` took, once it is there.

    Attributes:
        health_ms: Times of the answers of `/health`.
        records: Streams that ended, or were cut off a minute after the block.
        peak_bytes: Most memory seen.
    """

    def __init__(
        self,
        mesh: ServedMesh,
        key: str,
        *,
        num_streams: int,
        num_tokens: int,
        on_still: Callable[[float], None] = lambda _ms: None,
    ) -> None:
        self._mesh = mesh
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self._on_still = on_still
        self._client = Client(
            parse_url(f"http://127.0.0.1:{mesh.port}"),
            api_key=key,
            timeout_s=_TIMEOUT_S,
            clock_s=time.perf_counter,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self.health_ms: list[float] = []
        self.records: list[Record] = []
        self.peak_bytes = 0

    async def __aenter__(self) -> Self:
        """Begin."""
        watches = [self._probe(), self._look()]
        if self._num_streams:
            load = Load(self._client, time.perf_counter, self._ended)
            watches.append(load.closed_loop(self._jobs(), self._num_streams))
        self._tasks = [asyncio.create_task(watch) for watch in watches]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, once the streams under way have ended, for which there is a minute."""
        self._is_over = True
        if self._num_streams and error is None:
            await asyncio.wait(self._tasks[-1:], timeout=_DRAIN_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._client.close()

    def lost(self) -> list[str]:
        """Why streams broke off or were refused, one entry for each."""
        return [record.failure.message for record in self.records if record.failure is not None]

    def _jobs(self) -> Iterator[Job]:
        body = {
            "prompt": "Once upon a time there was",
            "max_tokens": self._num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        number = 0
        while self._mesh.is_running() and not self._is_over:
            yield Job(number, "neighbour", COMPLETION_PATH, json.dumps(body).encode())
            number += 1

    def _ended(self, record: Record) -> None:
        self.records.append(record)

    async def _probe(self) -> None:
        while self._mesh.is_running():
            begin_s = time.perf_counter()
            reply = WholeBody()
            with suppress(OSError):
                await self._client.exchange("GET", "/health", b"", reply)
            took_ms = (time.perf_counter() - begin_s) * 1e3
            if reply.status == _OK or self._mesh.is_running():
                self.health_ms.append(took_ms)
                self._on_still(took_ms)
            await asyncio.sleep(_PROBE_S)

    async def _look(self) -> None:
        while self._mesh.is_running():
            found = await asyncio.to_thread(footprint_of, self._mesh)
            self.peak_bytes = max(self.peak_bytes, found.size_bytes)
            await asyncio.sleep(_LOOK_S)


def footprint_of(mesh: ServedMesh) -> Footprint:
    """What a mesh holds now; zeros if it has ended. Takes some ten milliseconds."""
    found = [0, 0, 0, 0]
    busy_s = 0.0
    with suppress(psutil.Error):
        parent = psutil.Process(mesh.process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            # A process may end during the look.
            with suppress(psutil.Error):
                if role_of(process.cmdline()) == "ray":
                    continue
                more = (1, process.num_threads(), process.num_fds(), process.memory_full_info().pss)
                times = process.cpu_times()
                busy_s += times.user + times.system
                found = [total + each for total, each in zip(found, more, strict=True)]
    return Footprint(found[0], found[1], found[2], found[3], busy_s)


async def settled(mesh: ServedMesh, rest: Footprint, patience_s: float) -> Footprint:
    """The footprint as soon as nothing is left and the mesh is idle, or after some time.

    Args:
        mesh: The mesh.
        rest: The footprint before.
        patience_s: How long to wait, in seconds.
    """
    deadline_s = time.monotonic() + patience_s
    found = await asyncio.to_thread(footprint_of, mesh)
    while True:
        await asyncio.sleep(_LOOK_S)
        before, found = found, await asyncio.to_thread(footprint_of, mesh)
        is_idle = found.busy_s - before.busy_s < _IDLE_SHARE * _LOOK_S
        if (is_idle and found.excess_over(rest) is None) or time.monotonic() > deadline_s:
            return found
