"""Streaming client of an OpenAI server: parser of server-sent events, chunks, and one blocking request.

The load generators of `meshbench` read the same events over another transport, which takes times at the
socket and runs many requests at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx

from spanmesh_proto.errors import ClusterError, RequestError, Unauthorized
from stages.tls import authorities_for

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETION_PATH: Final = "/v1/completions"
# Data of the event that ends a stream.
DONE: Final = b"[DONE]"
MAX_MESSAGE_CHARS: Final = 300
# Fields of a chat's delta with generated text, besides `content`.
_OTHER_SPEECH: Final = ("reasoning_content", "reasoning", "refusal", "tool_calls")


class EventStream:
    """Cuts a stream into events, however the network cut it into pieces.

    Follows the HTML standard as far as OpenAI's servers use it: `data` lines, comments, either line end.
    Other fields are passed over.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" "))
            elif not text and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


@dataclass(frozen=True, slots=True)
class Chunk:
    """Content of a chunk."""

    text: str = ""
    """The answer's next piece."""
    token_ids: tuple[int, ...] = ()
    """Its token ids, if requested."""
    has_tokens: bool = False
    """Whether the model said anything in it, be it text, ids, reasoning or a tool call. A chat's opening
    chunk has none: it names the role, and some servers send it before they compute anything."""
    finish: str | None = None
    """Why the answer ends here, or None."""
    usage: dict[str, Any] = field(default_factory=dict)
    """Token counts; most chunks have none."""
    timings: dict[str, Any] = field(default_factory=dict)
    """The server's own account, as far as it gives one."""
    error: str | None = None
    """Why the server breaks off, or None."""


def read_chunk(fields: dict[str, Any]) -> Chunk:
    """From a chunk's JSON, of the chat or the completion endpoint; several choices count as one."""
    if error := fields.get("error"):
        return Chunk(error=str(error.get("message", error) if isinstance(error, dict) else error))
    text, finish = "", None
    ids: list[int] = []
    speaks = False
    for choice in fields.get("choices") or ():
        delta = choice.get("delta") or {}
        text += choice.get("text") or delta.get("content") or ""
        ids += choice.get("token_ids") or ()
        speaks = speaks or any(delta.get(name) for name in _OTHER_SPEECH)
        finish = choice.get("finish_reason") or finish
    return Chunk(
        text=text,
        token_ids=tuple(ids),
        has_tokens=bool(text or ids or speaks),
        finish=finish,
        usage=_object(fields.get("usage")),
        timings=_object(fields.get("timings")),
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def error_message(body: bytes) -> str:
    """Error text of a server in one line: OpenAI's `error.message`, or the whole text."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:MAX_MESSAGE_CHARS]


def stream_completion(
    url: str, body: dict[str, Any], *, api_key: str | None = None, timeout_s: float = 300.0
) -> Iterator[Chunk]:
    """Chunks of one streamed answer, as they arrive; closing the iterator stops the answer.

    Args:
        url: URL of the endpoint, with its path.
        body: Fields of the request; those that ask for a stream with usage are added.
        api_key: API key, if the server needs one.
        timeout_s: Longest silence of the server, in seconds.

    Raises:
        Unauthorized: If the server refuses the API key.
        RequestError: If it refuses the request, or reports an error in the stream.
        ClusterError: If the connection breaks, or the answer is not a stream of chunks.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = EventStream()
    try:
        with (
            httpx.Client(verify=authorities_for(url), trust_env=False, timeout=timeout_s) as client,
            client.stream("POST", url, json=streamed, headers=headers) as response,
        ):
            if response.status_code != 200:
                refusal = f"the server answered {response.status_code}: {error_message(response.read())}"
                raise (Unauthorized if response.status_code == 401 else RequestError)(refusal)
            for event in (event for data in response.iter_bytes() for event in events.feed(data)):
                if event == DONE:
                    return
                chunk = read_chunk(json.loads(event))
                if chunk.error is not None:
                    raise RequestError(chunk.error)
                yield chunk
    except (httpx.HTTPError, ValueError, TypeError, AttributeError) as error:
        raise ClusterError(f"{url}: {error or 'the connection broke'}") from error
