"""Fuzzing over HTTP with requests made from the API's own document."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import h11

from mesh.cli.head_client import ask_head
from meshbench.lab.local_mesh import ServedMesh, served_mesh
from spanmesh_proto.errors import ClusterError
from tests.qualification.fuzz.mutations import TEXTS, SchemaValues, damaged, damaged_value, json_text
from tests.qualification.fuzz.report import Tally

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.qualification.fuzz.report import FuzzOptions, FuzzReport

_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "G")
_ODD_HEADERS: Final = (
    b"Content-Length: 0", b"Content-Length: 99999999999999999999", b"Content-Length: 5",
    b"Content-Length: +5", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip",
    b"Transfer-Encoding: chunked, chunked",
    b"Content-Encoding: gzip", b"Expect: 100-continue", b"Connection: close", b"Connection: upgrade",
    b"Upgrade: websocket", b"Upgrade: h2c", b"Host: evil.example", b"Range: bytes=0-1", b"Origin: null",
    b"Content-Type: text/plain", b"Content-Type: application/json; charset=utf-16", b"Accept: */*;q=2",
    b"X: " + b"y" * 9000, b"X: " + b"y" * 70_000, b": no name", b" folded: line", b"X:\x00", b"X: \xff\xfe",
    b"Authorization: Bearer", b"Authorization: Basic eDp5", b"Authorization: Bearer \xff\xff", b"Host:",
)  # fmt: skip
_ENOUGH_TOKENS: Final = 3
# After half a request: how long an answer may come all the same before we say that no more will follow.
_MORE_S: Final = 0.05
_READ_BYTES: Final = 65536
_AT_ONCE: Final = 8
# One stage; room for a chat template's own words, but so little that no answer takes long.
_MESH_OPTIONS: Final = ("--stages", "1", "--threads", "1", "--ctx-size", "128", "--parallel", "4")
# Requests of many prompts wait for one another; on a busy machine that takes its time.
_TIMEOUT_S: Final = 180.0
_NUM_SAMPLES: Final = 100
# By then most sorts of requests have come, and what they load and keep for good is there.
_NUM_WARM_UP: Final = 250
_OK: Final = 200
_NOT_DONE_HERE: Final = 501
# Text in the log for an unexpected exception.
_MARKS: Final = (b"Traceback (most recent call last)", b"_unexpectedly", b"Fatal error")


@dataclass(frozen=True)
class HttpCase:
    """One request."""

    data: bytes
    """Its bytes, as they go out."""
    is_whole: bool
    """Whether a server need not wait for more of it."""
    statuses: frozenset[int] = frozenset()
    """Documented statuses; empty if the document has no such request."""
    undamaged: frozenset[int] = frozenset()
    """Those that it has for the request that this one was made of."""


class HttpCases:
    """Makes requests: a quarter as the document has them, the rest with something wrong.

    Args:
        document: The API's.
        key: An API key that opens it.
        random: Decides.
    """

    def __init__(self, document: Mapping[str, Any], key: str, random: Random) -> None:
        self._values = SchemaValues(document, random)
        self._key = key
        self._random = random
        self._operations = [
            (path, method.upper(), operation)
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        ]
        # Most requests that matter have a body.
        self._weights = [8 if "requestBody" in operation else 1 for _, _, operation in self._operations]

    def next(self) -> HttpCase:
        """The next request."""
        random = self._random
        path, method, operation = random.choices(self._operations, self._weights)[0]
        target = self._target(path, operation)
        headers = [b"Host: 127.0.0.1", b"Authorization: Bearer " + self._key.encode()]
        body = b""
        kind = random.random()
        if "requestBody" in operation:
            headers.append(b"Content-Type: application/json")
            body = self._body(operation, is_damaged=kind > 0.25)
        statuses = frozenset(int(status) for status in operation["responses"])
        if kind < 0.65:
            return HttpCase(self._request(method, target, headers, body), is_whole=True, statuses=statuses)
        if kind < 0.75:
            # What follows the damage is still a body of the length that its header says.
            body = damaged(body, random)
            return HttpCase(self._request(method, target, headers, body), is_whole=True, statuses=statuses)
        if kind < 0.85:
            headers = [*headers, *random.sample(_ODD_HEADERS, random.randint(1, 3))]
            random.shuffle(headers)
            if random.random() < 0.3:
                headers.pop()
        if random.random() < 0.3:
            method = random.choice(_METHODS)
        data = self._request(method, target, headers, body)
        if kind >= 0.85:
            data = damaged(data, random)
        if random.random() < 0.05:
            data *= random.randint(2, 4)
        return HttpCase(data, is_whole=is_whole(data), undamaged=statuses)

    def _body(self, operation: Mapping[str, Any], *, is_damaged: bool) -> bytes:
        random = self._random
        value = self._values.value(operation["requestBody"]["content"]["application/json"]["schema"])
        # Long answers would only cost time.
        value["max_tokens"] = random.randint(1, _ENOUGH_TOKENS)
        for name in ("max_completion_tokens", "max_output_tokens"):
            value.pop(name, None)
        if random.random() < 0.9:
            value.pop("model", None)
        return json_text(damaged_value(value, random) if is_damaged else value, random)

    def _target(self, path: str, operation: Mapping[str, Any]) -> bytes:
        random = self._random
        while "{" in path:
            before, _, rest = path.partition("{")
            path = before + quote(random.choice(TEXTS), errors="replace", safe="/") + rest.partition("}")[2]
        query = [
            f"{parameter['name']}={quote(str(self._parameter(parameter['schema'])), errors='replace')}"
            for parameter in operation.get("parameters", ())
            if parameter["in"] == "query" and random.random() < 0.7
        ]
        return (path + ("?" + "&".join(query) if query else "")).encode("ascii")

    def _parameter(self, schema: Mapping[str, Any]) -> Any:
        if self._random.random() < 0.5:
            return self._random.choice(TEXTS)
        return self._values.value(schema)

    def _request(self, method: str, target: bytes, headers: list[bytes], body: bytes) -> bytes:
        random = self._random
        if body and random.random() < 0.1:
            headers = [*headers, b"Transfer-Encoding: chunked"]
            at = random.randint(1, len(body))
            parts = [part for part in (body[:at], body[at:]) if part]
            body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        elif body:
            headers = [*headers, b"Content-Length: %d" % len(body)]
        head = b"\r\n".join([method.encode() + b" " + target + b" HTTP/1.1", *headers])
        return head + b"\r\n\r\n" + body


@dataclass(frozen=True)
class Reply:
    """Reaction of a server to one request."""

    status: int | None
    """Of its first answer; None if there was none."""
    content_type: str
    """Of that answer."""
    body: bytes
    """Of that answer, as far as it came."""
    is_over: bool
    """Whether the answer, or the connection, came to its end in time."""


class _Found:
    def __init__(self) -> None:
        self.status: int | None = None
        self.content_type = ""
        self.body = bytearray()
        self.is_over = False


def is_whole(data: bytes) -> bool:
    """Whether a server that has read all of it need not wait for more: it is a request, or surely none."""
    if not data:
        return False
    server = h11.Connection(h11.SERVER)
    try:
        server.receive_data(data)
        while True:
            event = server.next_event()
            if event is h11.NEED_DATA:
                return False
            if isinstance(event, h11.EndOfMessage) or event is h11.PAUSED:
                return True
    except h11.RemoteProtocolError:
        return True


async def exchange(port: int, case: HttpCase, timeout_s: float) -> Reply:
    """Send a request to 127.0.0.1 and read its first answer.

    A request that is not whole is followed by the end of what the client sends; the server then has nothing
    to wait for.

    Args:
        port: The server's.
        case: The request.
        timeout_s: For the whole exchange.

    Raises:
        OSError: If the server does not listen.
    """
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    # The answer's framing depends on nothing else of the request.
    method = b"HEAD" if case.data.startswith(b"HEAD ") else b"GET"
    client.send(h11.Request(method=method, target=b"/", headers=[(b"Host", b"x")]))
    client.send(h11.EndOfMessage())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = _Found()
    try:
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(ConnectionError):
                writer.write(case.data)
                await writer.drain()
                if not case.is_whole:
                    await asyncio.sleep(_MORE_S)
                    writer.write_eof()
                await _read(reader, client, found)
            found.is_over = True
    except TimeoutError:
        pass
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return Reply(found.status, found.content_type, bytes(found.body), found.is_over)


async def _read(reader: asyncio.StreamReader, client: h11.Connection, found: _Found) -> None:
    while True:
        try:
            event = client.next_event()
        except h11.RemoteProtocolError:
            return
        if event is h11.NEED_DATA:
            client.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            found.status = event.status_code
            found.content_type = next(
                (value.decode("latin-1") for name, value in event.headers if name == b"content-type"), ""
            )
        elif isinstance(event, h11.Data):
            found.body += event.data
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed) or event is h11.PAUSED:
            return


def fuzz_http(options: FuzzOptions) -> FuzzReport:
    """Feed requests, eight at once, and look at every answer.

    A failure is: the process is gone; no end of an answer in 180 s; a 5xx, but for 501 where the document
    has it for the request, or for the one that was damaged; a status, or an error's shape, that the API's
    document does not have; an unexpected exception in the log.

    Args:
        options: Options of the run.

    Raises:
        MeshError: If the mesh does not come up, or refuses a plain request.
    """
    key = secrets.token_urlsafe(32)
    with served_mesh(options.model, options.output, key, _MESH_OPTIONS) as mesh:
        return asyncio.run(_feed(mesh, options, key))


async def _feed(mesh: ServedMesh, options: FuzzOptions, key: str) -> FuzzReport:
    tally = Tally("http", options, time.monotonic)
    url = f"http://127.0.0.1:{mesh.port}/openapi.json"
    document = await asyncio.to_thread(ask_head, url, key, timeout_s=_TIMEOUT_S)
    # The key is another one in each run; what a seed makes must not be.
    cases = HttpCases(document, key, Random(options.seed))
    await _warm_up(mesh, key)
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


async def _warm_up(mesh: ServedMesh, key: str) -> None:
    """Have answers bound by a grammar given at once: the first of them load tables that are kept for good."""
    request = {
        "messages": [{"role": "user", "content": "Hello"}],
        "response_format": {"type": "json_object"},
        "max_tokens": _ENOUGH_TOKENS,
    }
    body = json.dumps(request).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    case = HttpCase(head % (key.encode(), len(body)) + body, is_whole=True)
    replies = await asyncio.gather(*(exchange(mesh.port, case, _TIMEOUT_S) for _ in range(_AT_ONCE)))
    if failed := [reply for reply in replies if reply.status != _OK]:
        raise ClusterError(f"a plain request is answered with {failed[0].status}: {failed[0].body[:500]!r}")


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
    elif reason := fault_of(case, reply):
        tally.fail("fault", case.data, reason)


def fault_of(case: HttpCase, reply: Reply) -> str | None:
    """Violation by the server, if there was one.

    Args:
        case: The request.
        reply: Its answer, which was complete.
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
