"""Recorded exchanges of an HTTP app: requests, statuses, stream events and texts.

The recording is a file of one JSON object a line, which holds whole request bodies: what agents send is best
read there.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The end of a stream of chat completions, which is no event of a type.
DONE: Final = "[DONE]"
_STREAM: Final = "text/event-stream"
# The watcher that waits for the server asks for it many times.
_UNRECORDED: Final = frozenset({"/health"})


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A request and what became of it."""

    method: str
    """HTTP method."""
    path: str
    """Path, without the query."""
    client: str = ""
    """User agent."""
    status: int | None = None
    """HTTP status; None if the client left before there was one."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """JSON object of the request; empty without one."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Number of stream events by type; empty for an answer in one piece."""
    last_event: str = ""
    """Type of the last one."""
    text: str = ""
    """Text of the answer, without reasoning and calls."""
    reasoning: str = ""
    """Reasoning of an answer in a stream."""
    error: str = ""
    """Body of a response with an error status."""
    is_complete: bool = False
    """Whether the whole response was sent."""

    @property
    def num_tools(self) -> int:
        """Tools that the request offers; those in a namespace count one by one."""
        tools = self.request.get("tools")
        if not isinstance(tools, list):
            return 0
        inner = (tool.get("tools") if isinstance(tool, dict) else None for tool in tools)
        return sum(len(each) if isinstance(each, list) else 1 for each in inner)


class ExchangeRecorder:
    """Middleware that appends every exchange to a file when it ends.

    Args:
        app: Next ASGI app.
        path: File of the recording.
    """

    def __init__(self, app: ASGIApp, path: Path) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        if scope["type"] != "http" or scope["path"] in _UNRECORDED:
            await self._app(scope, receive, send)
            return
        request, response = bytearray(), bytearray()
        status: int | None = None
        content_type, is_complete = "", False

        async def receive_noting() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                request.extend(message.get("body", b""))
            return message

        async def send_noting(message: Message) -> None:
            nonlocal status, content_type, is_complete
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
                content_type = _header(message.get("headers", ()), b"content-type")
            elif message["type"] == "http.response.body":
                response.extend(message.get("body", b""))
                is_complete = not message.get("more_body", False)

        try:
            await self._app(scope, receive_noting, send_noting)
        finally:
            exchange = exchange_of(
                method=scope["method"],
                path=scope["path"],
                client=_header(scope["headers"], b"user-agent"),
                status=status,
                content_type=content_type,
                request=bytes(request),
                response=bytes(response),
                is_complete=is_complete,
            )
            with self._path.open("a", encoding="utf-8") as recording:
                recording.write(json.dumps(asdict(exchange)) + "\n")


def exchange_of(
    *,
    method: str,
    path: str,
    client: str,
    status: int | None,
    content_type: str,
    request: bytes,
    response: bytes,
    is_complete: bool,
) -> Exchange:
    """The exchange of these bytes."""
    events = list(stream_events(response)) if content_type.startswith(_STREAM) else []
    is_refused = status is not None and status >= 400
    return Exchange(
        method=method,
        path=path,
        client=client,
        status=status,
        request=_object(request),
        events=dict(Counter(name for name, _event in events)),
        last_event=events[-1][0] if events else "",
        text="".join(_event_text(event) for _name, event in events) or _whole_text(_object(response)),
        reasoning="".join(_event_reasoning(event) for _name, event in events),
        error=response.decode("utf-8", "replace") if is_refused else "",
        is_complete=is_complete,
    )


def stream_events(body: bytes) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Type and data of each event of a stream, in order; comments and an unfinished last event left out."""
    *blocks, _rest = body.decode("utf-8", "replace").split("\n\n")
    for block in blocks:
        data = "\n".join(
            line.removeprefix("data:").lstrip(" ") for line in block.split("\n") if line.startswith("data:")
        )
        if data == DONE:
            yield DONE, {}
        elif data:
            event = _object(data.encode())
            yield str(event.get("type") or event.get("object") or next(iter(event), "")), event


def read_recording(path: Path) -> list[Exchange]:
    """The exchanges of a recording, in the order of their ends; none without a file."""
    if not path.exists():
        return []
    return [Exchange(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _header(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in headers if key.lower() == name), "")


def _object(data: bytes) -> dict[str, Any]:
    """A JSON object; empty if the data is something else."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _event_text(event: Mapping[str, Any]) -> str:
    """What an event of any of the three APIs adds to the answer's text."""
    if event.get("type") == "content_block_delta":
        return str(event["delta"].get("text", ""))
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def _event_reasoning(event: Mapping[str, Any]) -> str:
    """What an event adds to the answer's reasoning, likewise."""
    if event.get("type") == "content_block_delta":
        return str(event["delta"].get("thinking", ""))
    if event.get("type") == "response.reasoning_text.delta":
        return str(event["delta"])
    return "".join(choice["delta"].get("reasoning_content") or "" for choice in event.get("choices", ()))


def _whole_text(answer: Mapping[str, Any]) -> str:
    """The text of an answer in one piece."""
    if "choices" in answer:
        return "".join(choice.get("message", {}).get("content") or "" for choice in answer["choices"])
    items = answer.get("output", [answer])
    parts = [part for item in items for part in (item.get("content") or () if isinstance(item, dict) else ())]
    return "".join(part.get("text", "") for part in parts if isinstance(part, dict))
