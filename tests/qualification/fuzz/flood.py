"""A flood of the largest bodies by one key, beside streams of another, against the same flood thrown away."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import secrets
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import numpy as np

from mesh.api.bodies import max_body_bytes
from meshbench.lab.local_mesh import ServedMesh, served_mesh
from stages.gguf import Value, ValueType, read_header
from tests.qualification.fuzz.altered_models import write_altered
from tests.qualification.fuzz.head_watch import HeadWatch, footprint_of, settled
from tests.qualification.fuzz.report import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from meshbench.request_record import Record
    from tests.qualification.fuzz.head_watch import Footprint
    from tests.qualification.fuzz.report import FuzzOptions, FuzzReport

_CONTEXT: Final = 65_536
_NUM_LAYERS: Final = 2
_NUM_CONNECTIONS: Final = 64
_NUM_STREAMS: Final = 8
_STREAM_TOKENS: Final = 64
_MESH_OPTIONS: Final = (
    "--stages", "1", "--ctx-size", str(_CONTEXT), "--parallel", "12",
)  # fmt: skip
_ROUNDS: Final = 2
_PART_BYTES: Final = 256 * 1024
_ROOM_BYTES: Final = 512
_WARM_UP_S: Final = 5.0
_SETTLE_S: Final = 60.0
_MAX_RATIO: Final = 2.0
_MIB: Final = 2**20
_ANSWER: Final = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True)
class Pace:
    """What streams beside a flood felt."""

    num_streams: int
    """Streams that ended, well or not."""
    first_ms: float
    """Median time to the first token."""
    slow_first_ms: float
    """95th percentile of it."""
    gap_ms: float
    """99th percentile of the times between tokens."""


def flood_bodies(max_bytes: int) -> list[tuple[str, bytes]]:
    """Endpoints and bodies as large as is read: of words, of one run, of marks, of many messages.

    Args:
        max_bytes: Most bytes of a body that the server reads.
    """
    room = max_bytes - _ROOM_BYTES
    words, run, marks = "of the " * (room // 7), "a" * room, "<|im_end|>" * (room // 10)
    message = {"role": "user", "content": "of the " * 500}
    messages = [message] * (room // (len(json.dumps(message)) + 2))
    bodies = (
        ("/tokenize", {"prompt": words}),
        ("/tokenize", {"prompt": run, "return_token_strs": True}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 1}),
        ("/v1/completions", {"prompt": words, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": marks}]}),
    )
    return [(path, json.dumps(body).encode()) for path, body in bodies]


def flood(
    port: int, key: str, seed: int, *, duration_s: float, max_bytes: int, max_hang_up_s: float = 6.0
) -> None:
    """Send bodies over 64 connections to a port of this machine, and hang up at random; blocks.

    Each connection takes up to some seconds, and the next one begins at its end, whatever became of it: how
    much is sent does not depend on the server's pace.

    Args:
        port: On 127.0.0.1.
        key: API key.
        seed: The same seed sends the same bodies at the same times.
        duration_s: How long, in seconds.
        max_bytes: Size of a body.
        max_hang_up_s: When a connection ends at the latest, in seconds.
    """
    requests = []
    for path, body in flood_bodies(max_bytes):
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        requests.append(head.encode() + body)
    asyncio.run(_flood(port, requests, seed, time.monotonic() + duration_s, max_hang_up_s))


async def _flood(port: int, requests: Sequence[bytes], seed: int, end_s: float, max_hang_up_s: float) -> None:
    # Not for secrets: the same seed must make the same flood.
    randoms = [Random(f"{seed} {number}") for number in range(_NUM_CONNECTIONS)]
    await asyncio.gather(
        *(_connect_until(port, requests, random, end_s, max_hang_up_s) for random in randoms)
    )


async def _connect_until(
    port: int, requests: Sequence[bytes], random: Random, end_s: float, max_hang_up_s: float
) -> None:
    begin_s = time.monotonic()
    while True:
        data = memoryview(random.choice(requests))
        hang_up_s = random.uniform(0, max_hang_up_s)
        # A server may refuse before all is sent; TimeoutError is an OSError, too.
        with suppress(OSError):
            async with asyncio.timeout(hang_up_s):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    for at in range(0, len(data), _PART_BYTES):
                        writer.write(data[at : at + _PART_BYTES])
                        await writer.drain()
                    while await reader.read(_PART_BYTES):
                        pass
                finally:
                    writer.transport.abort()
        await asyncio.sleep(max(begin_s + hang_up_s - time.monotonic(), 0))
        begin_s = time.monotonic()
        if begin_s >= end_s:
            return


def throw_away(port_sender: Connection) -> None:
    """Serve until killed: read all that comes, and answer each body with nothing.

    Args:
        port_sender: Gets the port on 127.0.0.1.
    """
    asyncio.run(_throw_away(port_sender))


async def _throw_away(port_sender: Connection) -> None:
    async def discard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            left = int(head.rpartition(b"Content-Length: ")[2])
            while left and (data := await reader.read(min(left, _PART_BYTES))):
                left -= len(data)
            writer.write(_ANSWER)
        writer.close()

    server = await asyncio.start_server(discard, "127.0.0.1", 0)
    async with server:
        port_sender.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()


@contextmanager
def _thrown_away() -> Iterator[int]:
    """Port of a server in a process of its own that throws away what it reads."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=throw_away, args=(sender,), daemon=True)
    process.start()
    try:
        yield receiver.recv()
    finally:
        process.kill()
        process.join()


def pace_of(records: Sequence[Record]) -> Pace:
    """Pace of streams; infinite where none got so far.

    Args:
        records: Of the streams.
    """
    firsts_ms = [record.ttft_ms for record in records if record.parts_s]
    gaps_ms = [gap for record in records for gap in record.itls_ms]
    return Pace(
        len(records),
        float(np.median(firsts_ms)) if firsts_ms else float("inf"),
        float(np.percentile(firsts_ms, 95)) if firsts_ms else float("inf"),
        float(np.percentile(gaps_ms, 99)) if gaps_ms else float("inf"),
    )


def fuzz_flood(options: FuzzOptions) -> FuzzReport:
    """Measure what a flood costs the streams of another key, beyond what its bytes cost the machine.

    Two layers of the model are served with a context of 65,536. One key sends the largest bodies over 64
    connections and hangs up at random, another one has eight streams. The flood goes by turns to a server on
    the same machine that throws it away, and to the mesh. A failure (fault) is: a median time to the first
    token, or a 99th percentile of the times between tokens, of more than twice as much; a stream that breaks
    off; processes, threads, open files or memory that are left a minute later. A crash: the head is gone.

    Args:
        options: Options of the run; its number of cases is the seconds of each of the four turns.

    Raises:
        MeshError: If the mesh does not come up.
    """
    tally = Tally("flood", options, time.monotonic)
    keys = [secrets.token_urlsafe(32) for _ in range(2)]
    architecture = read_header(options.model).architecture
    longer = {f"{architecture}.context_length": Value.of(ValueType.UINT32, _CONTEXT)}
    with tempfile.TemporaryDirectory(prefix="spanmesh-fuzz-") as name:
        model = write_altered(options.model, Path(name) / "flood.gguf", longer, num_layers=_NUM_LAYERS)
        with (
            served_mesh(model, options.output, keys[0], _MESH_OPTIONS, keys[1:]) as mesh,
            _thrown_away() as port,
        ):
            asyncio.run(_measure(mesh, tally, options, keys, port))
    return tally.report()


async def _measure(
    mesh: ServedMesh, tally: Tally, options: FuzzOptions, keys: Sequence[str], discard_port: int
) -> None:
    ports = {"thrown away": discard_port, "at the mesh": mesh.port}
    records: dict[str, list[Record]] = {where: [] for where in ports}
    peaks_bytes = dict.fromkeys(ports, 0)
    async with HeadWatch(mesh, keys[0], num_streams=_NUM_STREAMS, num_tokens=_STREAM_TOKENS):
        await asyncio.sleep(_WARM_UP_S)
    rest = after = await asyncio.to_thread(footprint_of, mesh)
    for number in range(_ROUNDS):
        if after.excess_over(rest) is not None:
            break  # the mesh still works on the turn before, which would spoil the next
        for where, port in ports.items():
            watch = HeadWatch(mesh, keys[0], num_streams=_NUM_STREAMS, num_tokens=_STREAM_TOKENS)
            async with watch:
                await _flood_apart(port, keys[1], options.seed + number, options.num_cases)
            # What a turn left must not slow the next.
            after = await settled(mesh, rest, _SETTLE_S)
            records[where] += watch.records
            peaks_bytes[where] = max(peaks_bytes[where], watch.peak_bytes)
            for record in watch.records:
                tally.count(f"{where}: {'ended' if record.failure is None else record.failure.kind}")
                if record.failure is not None and mesh.is_running():
                    tally.fail("fault", b"", f"{where}, a stream of another key: {record.failure.message}")
            if not mesh.is_running():
                code = mesh.process.returncode
                tally.fail("crash", b"", f"{where}: the head is gone (exit code {code}), see {mesh.log}")
                return
    away, here = pace_of(records["thrown away"]), pace_of(records["at the mesh"])
    for name, beside, value in (
        ("first token", away.first_ms, here.first_ms),
        ("95th percentile of first tokens", away.slow_first_ms, here.slow_first_ms),
        ("99th percentile between tokens", away.gap_ms, here.gap_ms),
    ):
        tally.figures |= {
            f"{name}, flood thrown away, ms": beside,
            f"{name}, flood at the mesh, ms": value,
            f"{name}, ratio": value / beside,
        }
        if value > _MAX_RATIO * beside and name.startswith(("first", "99th")):
            tally.fail("fault", b"", f"{name}: {value:.0f} ms where the flood thrown away costs {beside:.0f}")
    _judge_rest(mesh, tally, rest, after)
    for where, peak_bytes in peaks_bytes.items():
        tally.figures[f"most memory, flood {where}, MiB"] = peak_bytes / _MIB


def _judge_rest(mesh: ServedMesh, tally: Tally, rest: Footprint, after: Footprint) -> None:
    """Note what the flood left."""
    for name, then, now in (
        ("processes", rest.num_processes, after.num_processes),
        ("threads", rest.num_threads, after.num_threads),
        ("open files", rest.num_files, after.num_files),
        ("memory, MiB", rest.size_bytes / _MIB, after.size_bytes / _MIB),
    ):
        tally.figures |= {f"{name} before": then, f"{name} afterwards": now}
    if (left := after.excess_over(rest)) is not None:
        tally.fail("fault", b"", f"left behind: {left}, see {mesh.log}")


async def _flood_apart(port: int, key: str, seed: int, duration_s: float) -> None:
    """Run `flood` in a process of its own, so that it does not delay the streams' clients."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=flood,
        args=(port, key, seed),
        kwargs={"duration_s": duration_s, "max_bytes": max_body_bytes(_CONTEXT)},
        daemon=True,
    )
    process.start()
    try:
        await asyncio.to_thread(process.join)
    finally:
        process.kill()
        process.join()
