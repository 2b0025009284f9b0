"""Streaming client in a child process, for one request at a time.

Run as a program, in the lab on the host of the measured server, it takes one JSON batch a line from standard
input, and answers each with one line of JSON on standard output.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mesh.util.completion_stream import CHAT_PATH, stream_completion
from meshbench.lab.line_process import LineProcess, answer_lines
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from meshbench.lab.network import Lab

_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        path: Endpoint.
        body: Its fields, but those that make it a stream with usage.
    """

    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """What to ask.

    Attributes:
        url: URL of the server, without `/v1`.
        asks: Requests, in order.
        num_at_once: How many may be under way together.
        api_key: API key of all of them, if the server needs one.
    """

    url: str
    asks: tuple[Ask, ...]
    num_at_once: int = 1
    api_key: str | None = None


@dataclass(frozen=True)
class Answer:
    """Answer to one request.

    Attributes:
        text: The answer.
        num_tokens: Its length, by the server's count.
        arrivals_ms: When each part of it came, counted from the request; at least one.
        timings: The server's own account, as far as it gives one.
        token_ids: Ids of all its tokens, if requested.
        finish: Why the answer ended, if the server gives a reason.
    """

    text: str
    num_tokens: int
    arrivals_ms: tuple[float, ...]
    timings: dict[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()
    finish: str | None = None

    @property
    def ttft_ms(self) -> float:
        """From the request to the first token."""
        return self.arrivals_ms[0]

    @property
    def decode_ms(self) -> float:
        """Time from the first token to the last."""
        return self.arrivals_ms[-1] - self.arrivals_ms[0]

    @property
    def tokens_per_s(self) -> float:
        """Decode rate: the first token belongs to the prefill."""
        return (self.num_tokens - 1) / (self.decode_ms / 1e3)


@dataclass(frozen=True)
class Reply:
    """A batch, answered.

    Attributes:
        answers: Answers in the order of the requests.
        wall_ms: From the first request to the last answer's end.
    """

    answers: tuple[Answer, ...]
    wall_ms: float


class Client(LineProcess):
    """Client on a lab host or on this machine; a context manager.

    Args:
        lab: Where; None is this machine, outside of any lab.
        host: Index of the lab's host.
    """

    def __init__(self, lab: Lab | None, host: int = 0) -> None:
        super().__init__(lab, host, "meshbench.blocking_client")

    def ask(self, batch: Batch) -> Reply:
        """Have a batch answered.

        Raises:
            MeshError: If a server refuses or breaks off.
        """
        reply = self.exchange(asdict(batch))
        if "error" in reply:
            raise MeshError(reply["error"])
        return Reply(tuple(map(_answer, reply["answers"])), reply["wall_ms"])


def chat(prompt: str, max_tokens: int, fields: dict[str, Any]) -> Ask:
    """One user message, answered greedily unless the fields say otherwise."""
    messages = [{"role": "user", "content": prompt}]
    return Ask(CHAT_PATH, {"messages": messages, "temperature": 0, "max_tokens": max_tokens, **fields})


def ask(url: str, wanted: Ask, *, api_key: str | None = None, timeout_s: float = _TIMEOUT_S) -> Answer:
    """Send one request.

    Args:
        url: URL of the server, without `/v1`.
        wanted: The request.
        api_key: API key, if the server needs one.
        timeout_s: Longest silence of the server, in seconds.

    Raises:
        MeshError: If the server refuses, breaks off, or answers with nothing that can be timed.
    """
    # Prompts are repeated: none may find itself in a cache.
    body = {"model": "default", "cache_prompt": False, **wanted.body}
    text, finish = "", None
    num_tokens = 0
    arrivals_ms: list[float] = []
    timings: dict[str, Any] = {}
    token_ids: list[int] = []
    start_s = time.perf_counter()
    for chunk in stream_completion(f"{url}{wanted.path}", body, api_key=api_key, timeout_s=timeout_s):
        now_ms = (time.perf_counter() - start_s) * 1e3
        num_tokens = chunk.usage.get("completion_tokens", num_tokens)
        timings.update(chunk.timings)
        token_ids += chunk.token_ids
        finish = chunk.finish or finish
        # The chunk with the finish reason leaves with the last token, which may have no text to show.
        if chunk.has_tokens or chunk.finish:
            text += chunk.text
            arrivals_ms.append(now_ms)
    if not arrivals_ms or num_tokens < 1:
        raise MeshError("the server's answer has no token or no usage")
    return Answer(text, num_tokens, tuple(arrivals_ms), timings, tuple(token_ids), finish)


def ask_batch(batch: Batch) -> list[Answer]:
    """Send all requests of a batch, and return answers in their order; raises MeshError like `ask`."""

    def one(wanted: Ask) -> Answer:
        return ask(batch.url, wanted, api_key=batch.api_key)

    if batch.num_at_once == 1:
        return [one(wanted) for wanted in batch.asks]
    with ThreadPoolExecutor(batch.num_at_once) as pool:
        return list(pool.map(one, batch.asks))


def _reply(fields: dict[str, Any]) -> dict[str, Any]:
    batch = Batch(**{**fields, "asks": tuple(Ask(**wanted) for wanted in fields["asks"])})
    start_s = time.perf_counter()
    reply: dict[str, Any]
    try:
        reply = {"answers": [asdict(answer) for answer in ask_batch(batch)]}
    except MeshError as error:
        reply = {"error": error.message}
    return {**reply, "wall_ms": (time.perf_counter() - start_s) * 1e3}


def _answer(fields: dict[str, Any]) -> Answer:
    """Restores tuples after JSON."""
    sequences = {name: tuple(fields[name]) for name in ("arrivals_ms", "token_ids")}
    return Answer(**{**fields, **sequences})


if __name__ == "__main__":
    answer_lines(_reply)
