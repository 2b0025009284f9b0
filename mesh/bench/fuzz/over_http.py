"""Hostile requests to the API of a real mesh."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from random import Random
from typing import TYPE_CHECKING, Final
from urllib import request

from mesh.bench.fuzz.http_cases import HttpCase, HttpCases
from mesh.bench.fuzz.http_exchange import Reply, exchange
from mesh.bench.fuzz.tally import Tally
from mesh.lab.local_mesh import ServedMesh, served_mesh

if TYPE_CHECKING:
    from typing import Any

    from mesh.bench.fuzz.options import FuzzOptions
    from mesh.bench.fuzz.report import FuzzReport

_AT_ONCE: Final = 8
# One stage; room for a chat template's own words, but so little that no answer takes long.
_MESH_OPTIONS: Final = ("--stages", "1", "--threads", "1", "--ctx-size", "128", "--parallel", "4")
# Requests of many prompts wait for one another; on a busy machine that takes its time.
_TIMEOUT_S: Final = 180.0
_NUM_SAMPLES: Final = 100
# By then each sort of request has come, and what it loads and keeps for good is there.
_NUM_WARM_UP: Final = 250
_NOT_DONE_HERE: Final = 501
# What the log says of an exception that nobody expected.
_MARKS: Final = (b"Traceback (most recent call last)", b"_unexpectedly", b"Fatal error")


def fuzz_http(options: FuzzOptions) -> FuzzReport:
    """Feed requests, eight at once, and look at every answer.

    A failure is: the process is gone; no end of an answer in 180 s; a 5xx, but for 501 where the document
    has it for the request, or for the one that was damaged; a status, or an error's shape, that the API's
    document does not have; an unexpected exception in the log.

    Args:
        options: What the user says.

    Raises:
        MeshError: If the mesh does not come up.
    """
    key = secrets.token_urlsafe(32)
    with served_mesh(options.model, options.output, key, _MESH_OPTIONS) as mesh:
        return asyncio.run(_feed(mesh, options, key))


async def _feed(mesh: ServedMesh, options: FuzzOptions, key: str) -> FuzzReport:
    tally = Tally("http", options, time.monotonic)
    # The key is another one in each run; what a seed makes must not be.
    cases = HttpCases(await asyncio.to_thread(_document, mesh.port, key), key, Random(options.seed))  # noqa: S311
    left = options.num_cases
    between = max(1, options.num_cases // _NUM_SAMPLES)

    async def work() -> None:
        nonlocal left
        while left > 0 and mesh.is_running():
            left -= 1
            if left % between == 0 and tally.num_cases >= _NUM_WARM_UP:
                tally.sample_memory(await asyncio.to_thread(mesh.own_bytes))
            await _one(mesh, tally, cases.next())

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(work())
    for line in (await asyncio.to_thread(mesh.log.read_bytes)).splitlines():
        if any(mark in line for mark in _MARKS):
            tally.fail("crash", line, f"an unexpected exception, see {mesh.log}")
    return tally.report()


async def _one(mesh: ServedMesh, tally: Tally, case: HttpCase) -> None:
    try:
        reply = await exchange(mesh.port, case, _TIMEOUT_S)
    except OSError as error:
        tally.count("no connection")
        tally.fail("crash", case.data, f"no connection: {error}")
        return
    tally.count("closed" if reply.status is None else str(reply.status))
    if not reply.is_over:
        tally.fail("hang", case.data, f"no end after {_TIMEOUT_S:g} s")
    elif reason := blame(case, reply):
        tally.fail("fault", case.data, reason)


def blame(case: HttpCase, reply: Reply) -> str | None:
    """What the server did wrong, if it did.

    Args:
        case: What it was asked.
        reply: Its answer, which came to its end.
    """
    if reply.status is None:
        return "no answer to a well-formed request" if case.statuses else None
    # Odd headers do not always keep a server from seeing what is asked of it.
    is_declined = reply.status == _NOT_DONE_HERE and reply.status in case.statuses | case.undamaged
    if reply.status >= 500 and not is_declined:
        return f"status {reply.status}: {reply.body[:500]!r}"
    if case.statuses and reply.status not in case.statuses:
        return f"status {reply.status} is not in the document: {reply.body[:500]!r}"
    if reply.status >= 400 and reply.body and not _is_error(reply):
        return f"an error of another shape: {reply.body[:500]!r}"
    return None


def _is_error(reply: Reply) -> bool:
    if reply.content_type != "application/json":
        return False
    try:
        error = json.loads(reply.body)["error"]
        return set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)
    except (ValueError, TypeError, KeyError):
        return False


def _document(port: int, key: str) -> dict[str, Any]:
    asked = request.Request(
        f"http://127.0.0.1:{port}/openapi.json", headers={"Authorization": f"Bearer {key}"}
    )
    opener = request.build_opener(request.ProxyHandler({}))
    with opener.open(asked, timeout=_TIMEOUT_S) as response:
        found: dict[str, Any] = json.load(response)
    return found
