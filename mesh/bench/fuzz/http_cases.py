"""Hostile HTTP requests, made from the API's own OpenAPI document. Pure: the generator decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import h11

from mesh.bench.fuzz.damage import damaged
from mesh.bench.fuzz.json_damage import damaged_value, json_text
from mesh.bench.fuzz.schema_values import TEXTS, SchemaValues

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

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


@dataclass(frozen=True)
class HttpCase:
    """One request.

    Attributes:
        data: Its bytes, as they go out.
        is_whole: Whether a server need not wait for more of it.
        statuses: Those that the document has for it; empty if it says nothing of such a request.
        undamaged: Those that it has for the request that this one was made of.
    """

    data: bytes
    is_whole: bool
    statuses: frozenset[int] = frozenset()
    undamaged: frozenset[int] = frozenset()


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
