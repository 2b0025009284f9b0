"""What a figure depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Circumstances:
    """How the load was made.

    Attributes:
        url: The server's.
        endpoint: `chat` or `completions`.
        model: Name that requests gave.
        loop: How the server was loaded, in words.
        rate: Requests a second of an open loop; None for a closed one.
        burstiness: Of an open loop's arrivals; None for a closed one.
        concurrency: Limit of requests under way; None without.
        num_planned: Requests that were to be sent.
        prompts: Where they are from, in words.
        num_prompts: How many there were, no two of them the same request.
        max_tokens: Of each answer.
        temperature: Of sampling; None if left to the server.
        ignore_eos: Whether answers were to go on to the last token.
        extra_body: Further fields of each request.
        goodput: The limits, in milliseconds, by latency.
        seed: Of prompts, their order, and arrivals.
        num_warmup: Requests before those measured.
        started_at: Wall clock at the start, ISO 8601 with zone.
        software: Version of this client.
    """

    url: str
    endpoint: str
    model: str
    loop: str
    rate: float | None
    burstiness: float | None
    concurrency: int | None
    num_planned: int
    prompts: str
    num_prompts: int
    max_tokens: int
    temperature: float | None
    ignore_eos: bool
    extra_body: dict[str, Any] | None
    goodput: dict[str, float]
    seed: int
    num_warmup: int
    started_at: str
    software: str
