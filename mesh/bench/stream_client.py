"""Ask an OpenAI server for streamed chat answers and note when each part arrives.

Run as a program on the host of the measured server: a JSON job on standard input, a JSON list of answers on
standard output.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from typing import Any

from spanmesh_proto.errors import MeshError


@dataclass(frozen=True)
class Job:
    """What to ask.

    Attributes:
        port: Of the server, on this host's loopback.
        prompts: One user message each, asked one after the other.
        max_tokens: Of each answer.
        fields: Further fields of the request body.
    """

    port: int
    prompts: tuple[str, ...]
    max_tokens: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt.

    Attributes:
        text: The answer.
        num_tokens: Its length, by the server's count.
        ttft_ms: From the request to the first token.
        decode_ms: From the first token to the last.
    """

    text: str
    num_tokens: int
    ttft_ms: float
    decode_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Decode rate: the first token belongs to the prefill."""
        return (self.num_tokens - 1) / (self.decode_ms / 1e3)


def ask(job: Job, prompt: str, *, timeout_s: float = 300.0) -> Answer:
    """Ask one question at temperature 0.

    Raises:
        MeshError: If the server refuses, or breaks off.
    """
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": job.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **job.fields,
    }
    connection = HTTPConnection("127.0.0.1", job.port, timeout=timeout_s)
    start_s = time.perf_counter()
    arrivals_s: list[float] = []
    text = ""
    num_tokens = 0
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise MeshError(
                f"the server answered {response.status}: {response.read().decode(errors='replace')}"
            )
        for line in response:
            if not line.startswith(b"data: "):
                continue
            now_s = time.perf_counter()
            if line.startswith(b"data: [DONE]"):
                break
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise MeshError(f"the server broke off: {chunk['error']}")
            if chunk.get("usage"):
                num_tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                text += piece
                # The chunk with the finish reason leaves with the last token, which may have no text to show.
                if piece or choice["finish_reason"]:
                    arrivals_s.append(now_s)
    finally:
        connection.close()
    if not arrivals_s or num_tokens < 1:
        raise MeshError(f"the server's answer to {prompt[:40]!r} has no token or no usage")
    return Answer(
        text=text,
        num_tokens=num_tokens,
        ttft_ms=(arrivals_s[0] - start_s) * 1e3,
        decode_ms=(arrivals_s[-1] - arrivals_s[0]) * 1e3,
    )


if __name__ == "__main__":
    wanted = Job(**json.load(sys.stdin))
    json.dump([asdict(ask(wanted, prompt)) for prompt in wanted.prompts], sys.stdout)
