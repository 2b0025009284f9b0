"""Options of `mesh bench serve`, importable without the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from meshbench.http_client import EndpointName, Server
    from meshbench.serving_metrics import Slo


@dataclass(frozen=True)
class LoadOptions:
    """A run of `mesh bench serve`.

    Attributes:
        server: The server.
        endpoint: Where.
        model: Name that requests give; None takes the first that the server lists.
        api_key: Goes with each request, if there is one.
        num_requests: Measured ones.
        rate: Requests a second in an open loop; None makes a closed loop.
        burstiness: See `load_generator.arrival_times_s`.
        concurrency: Requests under way at once; None sets no limit in an open loop, and is 1 in a closed one.
        num_warmup: Requests before those measured.
        dataset: File of prompts; None makes them up.
        prompt_tokens: Of each prompt that is made up, about.
        max_tokens: Of each answer.
        temperature: Of sampling; None leaves it to the server.
        ignore_eos: Whether answers continue to the last token.
        extra_body: Further fields of each request.
        seed: Of prompts, their order, and arrivals.
        timeout_s: Limit of a request; a longer one counts as failed.
        slos: Limits for goodput.
        percentiles: Which, in [0, 100].
        output: Folder for the report; None writes none.
    """

    server: Server
    endpoint: EndpointName
    model: str | None
    api_key: str | None
    num_requests: int
    rate: float | None
    burstiness: float
    concurrency: int | None
    num_warmup: int
    dataset: Path | None
    prompt_tokens: int
    max_tokens: int
    temperature: float | None
    ignore_eos: bool
    extra_body: dict[str, Any] | None
    seed: int
    timeout_s: float
    slos: tuple[Slo, ...]
    percentiles: tuple[float, ...]
    output: Path | None

    @property
    def loop_name(self) -> str:
        """Description of the load."""
        if self.rate is None:
            return f"closed loop, {self.concurrency or 1} at once"
        limit = "" if self.concurrency is None else f", at most {self.concurrency} at once"
        return f"open loop, {self.rate:g} requests/s, burstiness {self.burstiness:g}{limit}"
