"""Kills of the processes that read clients' bodies and texts, beside streams and long texts."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Final

import psutil

from meshbench.http_client import Client, WholeBody, parse_url
from meshbench.lab.local_mesh import ServedMesh, served_mesh
from tests.qualification.fuzz.head_watch import HeadWatch, footprint_of, settled
from tests.qualification.fuzz.report import Tally

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.qualification.fuzz.report import FuzzOptions, FuzzReport

_MODULES: Final = frozenset({"mesh.text.text_worker", "mesh.api.body_worker"})
_MESH_OPTIONS: Final = ("--stages", "1", "--threads", "1", "--ctx-size", "2048", "--parallel", "8")
_NUM_STREAMS: Final = 8
# Short ones, so that a stream begins, and a text is read, every few milliseconds.
_STREAM_TOKENS: Final = 8
_NUM_READERS: Final = 2
_TEXT: Final = "The processes read this text. " * 1_000
# A new process takes some hundred milliseconds, and nothing is read while none is there.
_LEAST_GAP_S: Final = 0.1
_MOST_GAP_S: Final = 0.9
_TIMEOUT_S: Final = 300.0
_SETTLE_S: Final = 30.0
_OK: Final = 200


class _Readers:
    """Has a long text tokenized again and again during the block.

    Attributes:
        num_read: Complete answers.
        failures: What the others were.
    """

    def __init__(self, mesh: ServedMesh, key: str) -> None:
        self._mesh = mesh
        self._key = key
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []
        self._first = asyncio.Event()
        self._num_ids = 0
        self.num_read = 0
        self.failures: list[str] = []

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.create_task(self._read()) for _ in range(_NUM_READERS)]

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def have_read(self) -> None:
        """Wait for the first answer: the processes run."""
        await self._first.wait()

    async def _read(self) -> None:
        url = parse_url(f"http://127.0.0.1:{self._mesh.port}")
        client = Client(url, api_key=self._key, timeout_s=_TIMEOUT_S, clock_s=time.perf_counter)
        body = json.dumps({"prompt": _TEXT}).encode()
        while self._mesh.is_running() and not self._is_over:
            reply = WholeBody()
            try:
                await client.exchange("POST", "/tokenize", body, reply)
                self._judge(reply.status, reply.body)
            except OSError as error:
                self.failures.append(f"/tokenize: {error}")
            self._first.set()
        client.close()

    def _judge(self, status: int, body: bytes) -> None:
        ids: Sequence[int] = json.loads(body)["tokens"] if status == _OK else ()
        self._num_ids = self._num_ids or len(ids)
        if ids and len(ids) == self._num_ids:
            self.num_read += 1
        else:
            self.failures.append(f"/tokenize: {status}, {len(ids)} ids: {body[:200]!r}")


def fuzz_kills(options: FuzzOptions) -> FuzzReport:
    """Kill the processes that read bodies and texts, at random moments, while they are used.

    Eight streams follow one another, and two connections have texts of 30,000 characters tokenized. A failure
    (fault) is an answer or a stream that is not complete, and what is left of processes, threads, files and
    memory. A crash: the head is gone.

    Args:
        options: Options of the run; its number of cases is the number of kills.

    Raises:
        MeshError: If the mesh does not come up.
    """
    tally = Tally("kills", options, time.monotonic)
    key = secrets.token_urlsafe(32)
    with served_mesh(options.model, options.output, key, _MESH_OPTIONS) as mesh:
        asyncio.run(_kill_and_judge(mesh, tally, options, key))
    return tally.report()


async def _kill_and_judge(mesh: ServedMesh, tally: Tally, options: FuzzOptions, key: str) -> None:
    readers = _Readers(mesh, key)
    watch = HeadWatch(mesh, key, num_streams=_NUM_STREAMS, num_tokens=_STREAM_TOKENS)
    # Not for secrets: the same seed must wait the same times.
    random = Random(options.seed)
    async with watch, readers:
        await readers.have_read()
        rest = await asyncio.to_thread(footprint_of, mesh)
        while tally.num_cases < options.num_cases and mesh.is_running():
            await asyncio.sleep(random.uniform(_LEAST_GAP_S, _MOST_GAP_S))
            module = await asyncio.to_thread(_kill_one, mesh, random)
            if module is not None:
                tally.count(module)
    if not mesh.is_running():
        tally.fail("crash", b"", f"the head is gone (exit code {mesh.process.returncode}), see {mesh.log}")
        return
    tally.figures |= {"streams that ended": len(watch.records), "texts that were read": readers.num_read}
    for message in (*watch.lost(), *readers.failures):
        tally.fail("fault", b"", message)
    after = await settled(mesh, rest, _SETTLE_S)
    if (left := after.excess_over(rest)) is not None:
        tally.fail("fault", b"", f"left behind: {left}, see {mesh.log}")


def _kill_one(mesh: ServedMesh, random: Random) -> str | None:
    """Kill one of the processes; its module, or None if there was none."""
    found = []
    with suppress(psutil.Error):
        for process in psutil.Process(mesh.process.pid).children():
            with suppress(psutil.Error):
                found += [(process, module) for module in process.cmdline() if module in _MODULES]
    if not found:
        return None
    process, module = random.choice(found)
    with suppress(psutil.NoSuchProcess):
        process.kill()
        return module
    return None
